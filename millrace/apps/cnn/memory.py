"""A check, before the first update, that training fits in device memory."""

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData, open_infeed
from millrace.apps.cnn.program import build_program
from millrace.config import ConfigurationError, replace_options
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.staging import compile_calls
from millrace.nn.layers import Layer, Tree
from millrace.program.compiling import compiling, peak_bytes
from millrace.program.memory_fit import memory_limit, too_large


def check_memory(
    config: CnnConfig,
    images: ImageData,
    model: list[Layer],
    weights: tuple[Tree, Tree],
    schedule: EventSchedule,
    *,
    needed_bytes: int,
    device: object,
) -> None:
    """Raise an error if a micro-batch does not fit, and name a power of two that does.

    Args:
        config: The configuration of the run.
        images: The data set.
        model: The layers of the model.
        weights: Its parameters and its state.
        schedule: The schedule of the run.
        needed_bytes: What the compiled programs need per device.
        device: One of the devices.
    """

    def needs(micro_batch_size: int) -> int:
        count = config.plan.batching.gradient_accumulation_count
        smaller = replace_options(
            config,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_count=count,
            global_batch_size=None,
        )
        program = build_program(smaller, images, model, schedule)
        state = program.init(*weights, seed=config.run.seed)
        # Only the size matters, so the kernels need not be autotuned.
        options = config.workflow.compiler_options()
        options["gpu"] = {**options["gpu"], "xla_gpu_autotune_level": 0}
        with compiling(options) as programs, open_infeed(images, smaller, 1) as infeed:
            compile_calls(program, state, infeed, 1)
        return peak_bytes(programs)

    limit = memory_limit(device)
    problem = too_large(config.plan.micro_batch_size, needed_bytes, limit, needs)
    if problem is not None:
        raise ConfigurationError(
            f"A micro-{problem}. Lower --micro-batch-size (with a larger "
            "--gradient-accumulation-count for the same global batch), or save memory "
            "with --recomputation or --precision 16.16."
        )
