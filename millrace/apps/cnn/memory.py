"""A check, before the first update, that training fits in device memory."""

import jax

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.data import ImageData, open_infeed
from millrace.apps.cnn.program import build_program
from millrace.config import ConfigurationError, replace_options
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.staging import compile_calls
from millrace.nn.layers import Layer
from millrace.program.compiling import compiling
from millrace.program.memory import describe_shortage, memory_limit, peak_bytes
from millrace.program.step import Weights


def check_memory(
    config: CnnConfig,
    images: ImageData,
    model: list[Layer],
    weights: Weights,
    schedule: EventSchedule,
    programs: list[jax.stages.Compiled],
) -> None:
    """Raise an error if compiled programs do not fit; name a micro-batch size that does."""

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

    needed, limit = peak_bytes(programs), memory_limit(jax.local_devices()[0])
    problem = describe_shortage(config.plan.micro_batch_size, needed, limit, needs)
    if problem is not None:
        raise ConfigurationError(
            f"A micro-{problem}. Lower --micro-batch-size (with a larger "
            "--gradient-accumulation-count for the same global batch), or save memory "
            "with --recomputation or --precision 16.16."
        )
