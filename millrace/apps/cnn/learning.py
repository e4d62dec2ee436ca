"""What a run says about its recipe, optimizer and learning rate before it starts."""

from typing import Any

import jax
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.program import build_learning_rate
from millrace.loop.event_schedule import EventSchedule
from millrace.nn.freezing import choose_scales
from millrace.nn.layers import num_parameters

_LARGEST_USUAL_RATE = {
    **{"sgd": 10.0, "lars": 100.0, "rmsprop": 1.0},
    **{"adam": 0.1, "adamw": 0.1, "lamb": 0.1, "muon": 0.1, "lion": 0.01},
    "muon_sgd": 2.0,
}
"""Peak learning rates that nobody trains with on purpose."""
_MAX_RATES = 100_000


def learning_rows(config: CnnConfig, schedule: EventSchedule) -> dict[str, str]:
    """Return the rows of the header about the recipe and the optimizer."""
    return {"recipe": _describe_recipe(config), "optimizer": _describe(config, schedule)}


def fine_tuning_rows(config: CnnConfig, params: Any) -> dict[str, str]:
    """Return the rows of the header about layers with a learning rate of their own."""
    recipe, rows = config.recipe, {}
    if recipe.freeze:
        scales = choose_scales(recipe.freeze, recipe.lr_scales, list(params))
        frozen = {name: tree for name, tree in params.items() if scales.get(name) == 0}
        rows["frozen"] = (
            f"{num_parameters(frozen):,} parameters: {', '.join(recipe.freeze)}"
        )
    if recipe.freeze_after:
        ends = (f"{name} after epoch {end:g}" for name, end in recipe.freeze_epochs.items())
        rows["frozen later"] = ", ".join(ends)
    if recipe.lr_scale:
        scaled = (f"{factor:g} x in {name}" for name, factor in recipe.lr_scales.items())
        rows["learning rate"] = ", ".join(scaled)
    return rows


def _describe_recipe(config: CnnConfig) -> str:
    if config.recipe.recipe == "modern":
        name = config.resolved_dataset
        return f"modern: defaults for {name} (--recipe graphcore for Graphcore's)"
    return "graphcore: defaults of Graphcore's applications (--recipe modern for others)"


def _describe(config: CnnConfig, schedule: EventSchedule) -> str:
    recipe = config.recipe
    decay = recipe.weight_decay or recipe.optimizer_params.get("weight_decay", 0)
    parts = [_describe_optimizer(config), _describe_rate(config, schedule)]
    if recipe.l2_regularization:
        parts.append(f"L2 regularization {recipe.l2_regularization:g}")
    if decay or not recipe.l2_regularization:
        parts.append(f"weight decay {decay:g}")
    if recipe.clip_norm is not None:
        parts.append(f"gradients clipped to norm {recipe.clip_norm:g}")
    if recipe.ema is not None:
        parts.append(f"weights averaged with decay {recipe.ema:g}")
    return ", ".join(parts)


def _describe_optimizer(config: CnnConfig) -> str:
    params = config.recipe.optimizer_params
    momentum = params.get("momentum")
    if not momentum:
        return config.recipe.optimizer
    kind = "Nesterov momentum" if params.get("nesterov") else "momentum"
    return f"{config.recipe.optimizer} with {kind} {momentum:g}"


def _describe_rate(config: CnnConfig, schedule: EventSchedule) -> str:
    recipe = config.recipe
    details = ["constant" if recipe.lr_schedule == "const" else recipe.lr_schedule]
    epochs = (recipe.lr_warmup_params or {}).get("warmup_epochs")
    if epochs:
        details.append(f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'} warmup")
    peak = float(_sample_rates(config, schedule).max())
    return f"learning rate {peak:.3g} ({', '.join(details)})"


def learning_rate_warnings(config: CnnConfig, schedule: EventSchedule) -> list[str]:
    """Warn about a learning rate that is absurdly large, or 0 long before the end."""
    peak = float(_sample_rates(config, schedule).max())
    usual = _LARGEST_USUAL_RATE[config.recipe.optimizer]
    warnings = []
    if peak > usual:
        warnings = [_describe_absurd_rate(config, peak, usual)]
    elif (config.graphcore.base_learning_rate or 0) > 0:
        warnings = [f"The learning rate reaches {peak:.3g}.{_explain_exponent(config)}"]
    return warnings + _warn_about_zero(config, schedule)


def _describe_absurd_rate(config: CnnConfig, peak: float, usual: float) -> str:
    recipe, batch = config.recipe, config.plan.batching.global_batch_size
    why = " Give a smaller --learning-rate."
    if config.graphcore.base_learning_rate is not None:
        why = _explain_exponent(config)
    elif recipe.learning_rate is None and recipe.lr_schedule != "stepped":
        why = (
            " initial_learning_rate is multiplied by the global batch of "
            f"{batch}; --learning-rate is not."
        )
    return (
        f"The learning rate reaches {peak:.3g}. {recipe.optimizer} hardly ever learns with "
        f"more than {usual:g}.{why}"
    )


def _explain_exponent(config: CnnConfig) -> str:
    """Return what a base learning rate means; none that trains well is positive."""
    exponent, batch = config.graphcore.base_learning_rate, config.plan.batching
    return (
        f" --base-learning-rate is an exponent: {exponent:g} means 2^{exponent:g} for each "
        f"of the {batch.global_batch_size} samples of a batch. For a learning rate of "
        f"{exponent:g}, give --learning-rate {exponent:g}."
    )


def _warn_about_zero(config: CnnConfig, schedule: EventSchedule) -> list[str]:
    starts = np.arange(0, schedule.total_updates, schedule.updates_per_epoch)
    rates = _rates(config, schedule, starts)
    first_zero = 1 + max(np.flatnonzero(rates > 0), default=-1)
    if first_zero >= len(starts) - 1:
        return []
    decays = "epochs_to_total_decay" in config.recipe.lr_schedule_params
    return [
        f"The learning rate is {rates[-1]:g} from epoch {first_zero} of {len(starts)} on: "
        "nothing is learned from there. Change "
        f"{'epochs_to_total_decay in ' if decays else ''}--lr-schedule-params, or "
        "--num-epochs."
    ]


def _sample_rates(config: CnnConfig, schedule: EventSchedule) -> np.ndarray:
    """Return the learning rates of all updates, or of many."""
    step = max(1, schedule.total_updates // _MAX_RATES)
    return _rates(config, schedule, np.arange(0, schedule.total_updates, step))


def _rates(config: CnnConfig, schedule: EventSchedule, updates: np.ndarray) -> np.ndarray:
    rate = build_learning_rate(config, schedule)
    return np.asarray(jax.device_get(jax.jit(jax.vmap(rate))(jax.device_put(updates))))
