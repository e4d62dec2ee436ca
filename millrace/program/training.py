"""Turn a loss, an optimizer and a plan into a training program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from jax import Array

from millrace.config import ConfigurationError
from millrace.plan import Plan
from millrace.program.accumulate import ModelStateReduction
from millrace.program.compiling import Options
from millrace.program.pipeline_program import build_pipeline_program
from millrace.program.step import LossFn, Step
from millrace.program.training_loop import TrainingProgram

__all__ = ["TrainingProgram", "training_program"]


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    model_state_reduction: ModelStateReduction = None,
    extra_info: Mapping[str, Callable[[Array], Any]] | None = None,
    devices: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Options] | None = None,
) -> TrainingProgram:
    """Return a compiled training loop.

    Args:
        loss_fn: ``(params, model_state, batch, key) -> (loss, (model_state, info))``,
            pure. The loss is a mean over the samples of `batch`; `info` is a flat dict of
            scalars.
        optimizer: An optax transformation of gradients, weights and, if it accepts
            ``value``, the loss (the unscaled mean over micro-batches and replicas).
        plan: How to replicate, accumulate, round and offload.
        model_state_reduction: How to reduce the model state of the micro-batches of an
            update, which all start from the same values: "mean" of the values (batch-norm
            statistics), "sum" of the changes (a table in which each sample has a row),
            "once" for the value of the first micro-batch of replica 0 (a counter of
            updates, a flag, a random key), or a function of path and value that returns
            one of these. By default, and where the function returns None, floats are
            averaged and everything else changes once per update.
        extra_info: Functions of the update number, such as a learning-rate schedule, to
            report with the info of each update.
        devices: Where to run; by default the first `plan.num_replicas` devices.
        compiler_options: XLA options that suit the loss, by platform ("cpu", "gpu"). A
            pipeline ignores them.
    """
    if not isinstance(plan, Plan):
        raise ConfigurationError(f"plan must be an mr.Plan, got {plan!r}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigurationError(
            f"optimizer must be one of optax, such as optax.adamw(1e-3), got {optimizer!r}."
        )
    info = dict(extra_info or {})
    step = Step(loss_fn, optimizer, plan, model_state_reduction, info)
    if plan.num_stages > 1:
        return build_pipeline_program(step, devices)
    return TrainingProgram(step, devices, compiler_options)
