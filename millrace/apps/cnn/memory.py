"""Whether training fits the devices' memory: found out before the first update."""

import dataclasses

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.device import compiler_options
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.feeding import open_infeed
from millrace.apps.cnn.program import program_of
from millrace.config import ConfigurationError
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.staging import compile_calls
from millrace.nn.layers import Layer, Tree
from millrace.program.compiling import compiling
from millrace.program.memory import describe_shortage, memory_limit, peak_bytes


def check_memory(
    config: CnnConfig,
    images: ImageData,
    model: list[Layer],
    weights: tuple[Tree, Tree],
    schedule: EventSchedule,
    needed: int,
    device: object,
) -> None:
    """Refuse micro-batches that cannot fit, and say which would.

    Args:
        config: What was asked for.
        images: To make smaller batches of.
        model: The network.
        weights: Its parameters and model state.
        schedule: How many updates are made at a time.
        needed: Bytes that the compiled programs take on a device.
        device: One of the devices.
    """

    def needs(batch: int) -> int:
        count = config.batching.gradient_accumulation_count
        smaller = dataclasses.replace(
            config,
            micro_batch_size=batch,
            gradient_accumulation_count=count,
            global_batch_size=None,
        )
        program = program_of(smaller, images, model, schedule)
        state = program.init(*weights, seed=config.seed)
        # Only the size matters: which kernels are the fastest need not be tried out.
        options = dict(compiler_options(config))
        options["gpu"] = {**options["gpu"], "xla_gpu_autotune_level": 0}
        with compiling(options) as programs, open_infeed(images, smaller, 1) as infeed:
            compile_calls(program, state, infeed, 1)
        return peak_bytes(programs)

    said = describe_shortage(config.micro_batch_size, needed, memory_limit(device), needs)
    if said is not None:
        raise ConfigurationError(
            f"A micro-{said}. Lower --micro-batch-size (with a larger "
            "--gradient-accumulation-count for the same global batch), or save memory "
            "with --recomputation or --precision 16.16."
        )
