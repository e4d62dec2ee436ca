"""A model cut into the stages of a pipeline, before any of its layers."""

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
from millrace.program.step import narrow
from millrace.schedule.stages import Stages, place_stages

_log = logging.getLogger("millrace")

_FLOPS_PER_BYTE = 20
"""What a device computes while it moves a byte: between CPUs (5) and GPUs (200)."""

_UNEVEN = 1.25
"""A split whose slowest stage is this much slower than need be is worth a word."""


class StagedModel(NamedTuple):
    """The layers of every stage, and where the stages stand."""

    stages: Stages
    layers: tuple[tuple[Layer, ...], ...]
    """By stage."""

    def own(self, stage: int, tree: Tree) -> Tree:
        """Return a stage's part of the weights or model state."""
        return _part(self.layers[stage], tree)

    def names(self, stage: int) -> list[str]:
        """Names of a stage's layers."""
        return layer_names(self.layers[stage])

    def stages_on(self, device: int) -> list[int]:
        """The stages of a device."""
        return [s for s, where in enumerate(self.stages.device_of) if where == device]

    def layers_on(self, device: int) -> list[str]:
        """Names of a device's layers, stage by stage."""
        return [name for s in self.stages_on(device) for name in self.names(s)]


def split_model(
    loss: LayeredLoss, plan: Plan, params: Tree, model_state: Tree
) -> StagedModel:
    """Cut the model as the plan says, or where the stages cost about the same."""
    splits = check_splits(loss, plan)
    costs = None
    if loss.example is not None and (cpu := _cpu()):
        seen = jax.eval_shape(
            lambda *trees: narrow(trees, plan.types.compute), params, loss.example
        )
        shapes = jax.eval_shape(lambda c: c, model_state)
        with jax.default_device(cpu):
            costs = layer_costs(loss, seen[0], seen[1], shapes)
    if splits is None and costs is None:
        raise ConfigurationError(
            f"pipeline_splits gives a number of stages ({plan.num_stages}); to choose "
            "them, LayeredLoss needs an example, and JAX a CPU (JAX_PLATFORMS, if set, "
            "must name it too). Or give the names of layers."
        )
    if splits is None:
        splits = choose_splits(loss.layers, costs, plan.num_stages)
        _log.info("Pipeline stages start at %s.", ", ".join(splits))
    elif costs is not None:
        _recommend(loss.layers, costs, splits)
    return place(cut(loss.layers, splits), plan)


def _cpu() -> Any:
    """Return a CPU to estimate costs for: XLA does not, before compiling, for others."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _part(layers: Sequence[Layer], tree: Tree) -> Tree:
    return {name: tree[name] for name in layer_names(layers) if name in tree}


def cut(layers: Sequence[Layer], splits: Sequence[str]) -> list[tuple[Layer, ...]]:
    """Start a new list of layers at each split."""
    positions: list[list[Layer]] = [[]]
    for layer in layers:
        if layer.name in splits:
            positions.append([])
        positions[-1].append(layer)
    return [tuple(position) for position in positions]


def place(positions: Sequence[tuple[Layer, ...]], plan: Plan) -> StagedModel:
    """Number the stages; a concurrent layer that is alone may be spread over devices."""
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
            "cannot be spread over devices. Let another layer follow it in a stage."
        )
    return StagedModel(place_stages(shape, mapping), tuple(stages))


def check_splits(loss: LayeredLoss, plan: Plan) -> list[str] | None:
    """Return the splits' names, all of them legal; None if the plan gives a number."""
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
                f"pipeline_splits: no stage can start at {name!r}.{hint} It can at: "
                f"{', '.join(legal)}."
            )
    if splits != sorted(splits, key=legal.index):
        ordered = " ".join(sorted(splits, key=legal.index))
        raise ConfigurationError(
            f"pipeline_splits must come in the model's order: {ordered}."
        )
    return splits


def layer_costs(
    loss: LayeredLoss, params: Tree, example: Any, model_state: Tree
) -> list[float]:
    """Estimate each layer's time, forward and backward, from the work it asks for.

    All trees have shapes and types only, so that nothing says where to compute.
    """
    x = jax.eval_shape(loss.inputs, example, jax.random.key(0))
    costs = []
    for layer in loss.layers:
        costs.append(_cost(layer, params, model_state, x))
        x = layer_output(layer, params, model_state, x)
    return costs


def _cost(layer: Layer, params: Tree, model_state: Tree, x: Any) -> float:
    own = (_part([layer], params), _part([layer], model_state))

    def forward_and_backward(params: Tree, model_state: Tree, x: Any) -> Any:
        def run(params: Tree, x: Any) -> Any:
            return apply_layers([layer], params, model_state, x, training=False)[0]

        y, backward = jax.vjp(run, params, x)
        return backward(jax.tree.map(jnp.ones_like, y))

    analysis = jax.jit(forward_and_backward).lower(*own, x).cost_analysis() or {}
    moved = analysis.get("bytes accessed", 0.0)
    return analysis.get("flops", 0.0) + _FLOPS_PER_BYTE * moved


def choose_splits(
    layers: Sequence[Layer], costs: Sequence[float] | None, num_stages: int
) -> list[str]:
    """Cut so that the dearest stage is as cheap as it can be."""
    assert costs is not None
    # best[k][i]: the dearest of k stages made of the first i layers, and the last cut.
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
    cuts, end = [], len(layers)
    for row in reversed(best[2:]):
        end = row[end][1]
        cuts.append(layers[end].name)
    return cuts[::-1]


def _dearest(layers: Sequence[Layer], costs: Sequence[float], splits: list[str]) -> float:
    of_layer = {layer.name: cost for layer, cost in zip(layers, costs, strict=True)}
    return max(sum(of_layer[layer.name] for layer in part) for part in cut(layers, splits))


def _recommend(layers: Sequence[Layer], costs: Sequence[float], splits: list[str]) -> None:
    better = choose_splits(layers, costs, len(splits) + 1)
    ratio = _dearest(layers, costs, splits) / _dearest(layers, costs, better)
    if ratio > _UNEVEN:
        _log.warning(
            "These pipeline_splits are uneven: the slowest stage has about %.1f times the "
            "work it could have. More even: --pipeline-splits %s",
            ratio,
            " ".join(better),
        )
