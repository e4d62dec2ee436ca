"""Split a model into the stages of a pipeline: where, at what cost, on which devices."""

import difflib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.config import ConfigurationError
from millrace.nn.layers import Layer, Tree, apply_layers, layer_names, layer_output
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.mixed_precision import narrow
from millrace.schedule.stages import Stages, place_stages

_log = logging.getLogger("millrace")

_FLOPS_PER_BYTE = 20
"""Floating-point operations in the time it takes to move a byte; between CPUs (5) and
GPUs (200)."""

_UNEVEN_RATIO = 1.25
"""Warn if the slowest stage has this many times the work it could have."""


class StagedModel(NamedTuple):
    """The layers of every stage, and the devices of the stages."""

    stages: Stages
    layers: tuple[tuple[Layer, ...], ...]
    """By stage."""

    def select(self, stage: int, tree: Tree) -> Tree:
        """Return the weights or model state of a stage."""
        return _select(self.layers[stage], tree)

    def names(self, stage: int) -> list[str]:
        """Return the names of the layers of a stage."""
        return layer_names(self.layers[stage])

    def stages_on(self, device: int) -> list[int]:
        """Return the stages of a device."""
        return [s for s, d in enumerate(self.stages.device_of) if d == device]

    def layers_on(self, device: int) -> list[str]:
        """Return the names of the layers of a device, stage by stage."""
        return [name for s in self.stages_on(device) for name in self.names(s)]


def split_model(
    loss: LayeredLoss, plan: Plan, params: Tree, model_state: Tree
) -> StagedModel:
    """Split the model at the plan's layers, or into stages of about equal cost."""
    splits = check_splits(loss, plan)
    costs = None
    # On a single device, it does not matter how the work is divided.
    is_wanted = splits is None or plan.devices_per_replica > 1
    if is_wanted and loss.example is not None and (cpu := _cpu()):
        # Only shapes, so that no array decides where to compute.
        params_shape, example = jax.eval_shape(
            lambda *trees: narrow(trees, plan.types.compute), params, loss.example
        )
        state_shape = jax.eval_shape(lambda tree: tree, model_state)
        with jax.default_device(cpu):
            costs = layer_costs(loss, params_shape, example, state_shape)
    if splits is None and costs is None:
        raise ConfigurationError(
            f"pipeline_splits is a number of stages ({plan.num_stages}). To choose them, "
            "LayeredLoss needs an example, and JAX needs a CPU (JAX_PLATFORMS, if set, "
            "must include it). Or name the layers."
        )
    if splits is None:
        splits = choose_splits(loss.layers, costs, plan.num_stages)
        _log.info("Pipeline stages start at %s.", ", ".join(splits))
    elif costs is not None:
        _warn_if_uneven(loss.layers, costs, splits)
    return assign_devices(split_layers(loss.layers, splits), plan)


def _cpu() -> Any:
    """Return a CPU to estimate costs for; XLA estimates no others before compiling."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _select(layers: Sequence[Layer], tree: Tree) -> Tree:
    return {name: tree[name] for name in layer_names(layers) if name in tree}


def split_layers(layers: Sequence[Layer], splits: Sequence[str]) -> list[tuple[Layer, ...]]:
    """Start a new list of layers at each split."""
    positions: list[list[Layer]] = [[]]
    for layer in layers:
        if layer.name in splits:
            positions.append([])
        positions[-1].append(layer)
    return [tuple(position) for position in positions]


def assign_devices(positions: Sequence[tuple[Layer, ...]], plan: Plan) -> StagedModel:
    """Number the stages; a concurrent layer that is a position of its own may be spread."""
    mapping = plan.device_mapping
    shape, stages = [], []
    for number, layers in enumerate(positions):
        branches = layers[0].branches if len(layers) == 1 else ()
        spread = branches and (mapping is None or isinstance(mapping[number], list))
        shape.append(len(branches) if spread else 1)
        stages += branches if spread else [layers]
    if shape[-1] > 1:
        raise ConfigurationError(
            f"The last stage, {positions[-1][0].name}, has the loss, so its branches "
            "cannot be spread over devices. Put a layer after it into the same stage."
        )
    return StagedModel(place_stages(shape, mapping), tuple(stages))


def check_splits(loss: LayeredLoss, plan: Plan) -> list[str] | None:
    """Return the names of the splits, checked; None if the plan gives a number."""
    legal = [layer.name for layer in loss.layers][1:]
    if plan.num_stages > len(loss.layers):
        raise ConfigurationError(
            f"pipeline_splits asks for {plan.num_stages} stages; the model has only "
            f"{len(loss.layers)} layers."
        )
    splits = [str(split) for split in plan.pipeline_splits]
    if isinstance(plan.pipeline_splits[0], int):
        return None
    for name in splits:
        if name not in legal:
            nearest = difflib.get_close_matches(name, legal, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise ConfigurationError(
                f"pipeline_splits: no stage can start at {name!r}.{hint} Possible layers: "
                f"{', '.join(legal)}."
            )
    if splits != sorted(splits, key=legal.index):
        ordered = " ".join(sorted(splits, key=legal.index))
        raise ConfigurationError(
            f"pipeline_splits must be in the order of the model: {ordered}."
        )
    return splits


def layer_costs(
    loss: LayeredLoss, params: Tree, example: Any, model_state: Tree
) -> list[float]:
    """Estimate the relative time of each layer's forward and backward pass.

    Args:
        loss: The model.
        params: Shapes of the weights.
        example: Shapes of a batch.
        model_state: Shapes of the model state.
    """
    x = jax.eval_shape(loss.inputs, example, jax.random.key(0))
    costs, known = [], {}
    for layer in loss.layers:
        costs.append(_cost(layer, params, model_state, x, known))
        x = layer_output(layer, params, model_state, x)
    return costs


def _cost(
    layer: Layer, params: Tree, model_state: Tree, x: Any, known: dict[str, float]
) -> float:
    """Return the cost of a layer, from `known` if it computes the same as another one."""
    own = (_select([layer], params), _select([layer], model_state))

    def forward_and_backward(params: Tree, model_state: Tree, x: Any) -> Any:
        def run(params: Tree, x: Any) -> Any:
            return apply_layers([layer], params, model_state, x, training=False)[0]

        y, backward = jax.vjp(run, params, x)
        return backward(jax.tree.map(jnp.ones_like, y))

    traced = jax.jit(forward_and_backward).trace(*own, x)
    if (text := str(traced.jaxpr)) not in known:
        analysis = traced.lower().cost_analysis() or {}
        num_bytes = analysis.get("bytes accessed", 0.0)
        known[text] = analysis.get("flops", 0.0) + _FLOPS_PER_BYTE * num_bytes
    return known[text]


def choose_splits(
    layers: Sequence[Layer], costs: Sequence[float] | None, num_stages: int
) -> list[str]:
    """Choose the splits that minimize the cost of the most expensive stage."""
    assert costs is not None
    # Dynamic programming. best[k][i] is the cost of the most expensive of k stages made
    # of the first i layers, and where the last of them starts.
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = [{0: (0.0, 0)}]
    for count in range(1, num_stages + 1):
        row = {}
        for end in range(count, len(layers) + 1):
            row[end] = min(
                (max(best[-1][start][0], total[end] - total[start]), start)
                for start in best[-1]
                if start < end
            )
        best.append(row)
    splits, end = [], len(layers)
    for row in reversed(best[2:]):
        end = row[end][1]
        splits.append(layers[end].name)
    return splits[::-1]


def _max_cost(layers: Sequence[Layer], costs: Sequence[float], splits: list[str]) -> float:
    cost_of = {layer.name: cost for layer, cost in zip(layers, costs, strict=True)}
    return max(
        sum(cost_of[layer.name] for layer in part) for part in split_layers(layers, splits)
    )


def _warn_if_uneven(
    layers: Sequence[Layer], costs: Sequence[float], splits: list[str]
) -> None:
    better = choose_splits(layers, costs, len(splits) + 1)
    ratio = _max_cost(layers, costs, splits) / _max_cost(layers, costs, better)
    if ratio > _UNEVEN_RATIO:
        _log.warning(
            "These pipeline_splits are uneven: the slowest stage has about %.1f times the "
            "work it could have. A more even split: --pipeline-splits %s",
            ratio,
            " ".join(better),
        )
