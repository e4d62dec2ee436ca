"""``vcd train`` as work to be measured."""

import numpy as np

from millrace.apps.vcd import data
from millrace.apps.vcd import program as vcd_program
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.devices import chosen_devices
from millrace.apps.vcd.shuffle import ShuffledIndices
from millrace.apps.vcd.train import plan_events
from millrace.bench.workload import Training
from millrace.feeds.infeed import Infeed
from millrace.program.compiling import Options


class VcdTraining(Training):
    """Training that multiplies as exactly as it is told to."""

    def __init__(self, config: VcdConfig, *, random_data: bool = False) -> None:
        self._config = config
        pictures = _random() if random_data else _training_pictures(config)
        schedule = plan_events(config, len(pictures))
        with chosen_devices(config) as devices:
            super().__init__(
                vcd_program.program_of(config, pictures, devices),
                vcd_program.init(config, pictures),
                Infeed(
                    ShuffledIndices(
                        len(pictures), config.batching.samples_per_step, seed=config.seed
                    )
                ),
                schedule.updates_per_execution,
            )

    def compile(self, options: Options | None = None) -> None:
        with chosen_devices(self._config):
            super().compile(options)


def _training_pictures(config: VcdConfig) -> data.BinaryPictures:
    held_out = config.num_validation if config.validation else 0
    return data.load(config, num_validation=held_out).training


def _random() -> data.BinaryPictures:
    """Return as many pictures of as many pixels as binarized MNIST has to train with."""
    drawn = np.random.default_rng(0).integers(0, 2, (50_000, 28, 28, 1), np.uint8)
    return data.binarize(drawn, 0)
