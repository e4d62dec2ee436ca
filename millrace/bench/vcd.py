"""``vcd train`` as work to be measured."""

import numpy as np

from millrace.apps.vcd import data
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.evaluate import chosen_devices
from millrace.apps.vcd.program import build_program, init_state
from millrace.apps.vcd.train import build_schedule
from millrace.bench.workload import Training
from millrace.feeds.infeed import Infeed
from millrace.program.compiling import Options


class VcdTraining(Training):
    """Training that multiplies as exactly as it is told to."""

    def __init__(self, config: VcdConfig, *, random_data: bool = False) -> None:
        self._config = config
        images = _random() if random_data else _training_images(config)
        schedule = build_schedule(config, len(images))
        batch_size = config.plan.batching.samples_per_step
        batches = data.ShuffledIndices(len(images), batch_size, seed=config.run.seed)
        with chosen_devices(config.devices) as devices:
            super().__init__(
                build_program(config, images, devices),
                init_state(config, images),
                Infeed(batches),
                schedule.updates_per_execution,
            )

    def compile(self, options: Options | None = None) -> None:
        with chosen_devices(self._config.devices):
            super().compile(options)


def _training_images(config: VcdConfig) -> data.BinaryImages:
    num_held_out = config.workflow.num_held_out
    return data.load_images(config.data, num_validation=num_held_out).training


def _random() -> data.BinaryImages:
    """Return as many pictures of as many pixels as binarized MNIST has to train with."""
    drawn = np.random.default_rng(0).integers(0, 2, (50_000, 28, 28, 1), np.uint8)
    return data.binarize(drawn, 0)
