"""The stages of a pipeline as functions, and the buffers that pass between them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from millrace.config import ConfigurationError
from millrace.nn.layers import Tree, apply_layers, layer_names
from millrace.nn.losses import LayeredLoss
from millrace.program import packing
from millrace.program import step as steps
from millrace.program.accumulate import (
    check_model_state,
    model_state_contribution,
    reduction_modes,
)
from millrace.program.mixed_precision import narrow
from millrace.program.packing import BufferLayout, Buffers
from millrace.program.replicas import map_over_mesh
from millrace.program.split_backward import BackwardResults, SplitBackward
from millrace.program.state_layout import StateLayout
from millrace.program.step import Step, TrainState


class StageOperands(NamedTuple):
    """What a stage computes from."""

    params: Tree
    model_state: Tree
    x: Any
    batch: Any
    key: Any


class StageResiduals(NamedTuple):
    """What the forward pass of a stage keeps for its backward pass.

    JAX's backward function is a pytree whose leaves are its residuals. They are stored
    between the two passes, except those that are operands of the stage (its weights or
    its input): the backward pass has these anyway.
    """

    structure: Any
    """The structure of the backward function."""
    stored: tuple[int, ...]
    """Positions of the leaves that are stored."""
    operands: Mapping[int, int]
    """Positions of the leaves that are operands, with their positions among these."""
    layout: BufferLayout


class PipelineStages:
    """The stages of a pipeline, for micro-batches of one shape.

    Args:
        step: What defines an update; its loss is a ``LayeredLoss``.
        layout: Where the values of each device are.
        state: A packed state, or its shapes.
        batch: The shapes of a micro-batch of one replica.
        mesh: The devices, by replica and stage.
        splits_backward: Whether gradients of weights are computed apart from the others.
    """

    def __init__(
        self,
        step: Step,
        layout: StateLayout,
        state: TrainState,
        batch: Any,
        mesh: Mesh,
        *,
        splits_backward: bool = False,
    ) -> None:
        assert isinstance(step.loss_fn, LayeredLoss)
        self.step = step
        self.loss: LayeredLoss = step.loss_fn
        self.layout = layout
        self._mesh = mesh
        # With recomputation, a stage keeps nothing: its backward pass runs the forward
        # pass again, from the input that is still in its receive slot.
        self.keeps_residuals = not step.plan.recomputation
        self.splits_backward = splits_backward
        self._find_shapes(state, batch)

    def _find_shapes(self, state: TrainState, batch: Any) -> None:
        """Trace one micro-batch through the stages."""
        model, compute = self.layout.model, self.step.plan.types.compute
        batch = jax.eval_shape(lambda b: narrow(b, compute), batch)
        key = jax.eval_shape(lambda: jax.random.key(0))
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (state.params, state.model_state),
        )
        copy_params = functools.partial(steps.copy_params, self.step.plan, state)
        self.boundaries: list[BufferLayout] = []  # layouts of the output of each position
        self.info_names: list[str] = []
        self.residuals: list[StageResiduals] = []
        self.backwards: list[SplitBackward] = []
        x: Any = self._eval_shape(self.loss.inputs, batch, key)
        for group in model.stages.groups:
            outputs: list[Any] = []
            for stage in group:
                params, model_state = jax.eval_shape(
                    lambda *rows, stage=stage: self.unpack_values(stage, *rows), *rows
                )
                params = jax.eval_shape(copy_params, params)
                operands = StageOperands(params, model_state, x, batch, key)
                output, (_, info) = self._eval_shape(self.forward(stage), *operands)
                self.info_names = list(info)
                self.residuals.append(self._find_residuals(stage, operands))
                if self.splits_backward:
                    self.backwards.append(self._split_backward(stage, operands, output))
                outputs.append(output)
            x = tuple(outputs) if len(group) > 1 else outputs[0]
            ends = [model.layers[stage][-1].name for stage in group]
            _check_differentiable(x, " and ".join(ends))
            self.boundaries.append(packing.build_layout(x))
        # Every device sends and stores at every tick, whatever its stage: so all buffers
        # have the size of the largest. The last position sends nothing.
        self.boundary_sizes = packing.max_sizes(b.sizes for b in self.boundaries[:-1])
        self.residual_sizes = packing.max_sizes(r.layout.sizes for r in self.residuals)
        self.deferred_sizes = packing.max_sizes(b.layout.sizes for b in self.backwards)

    def _eval_shape(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Return shapes of results on a device, where a layer may reduce over replicas."""
        same = PartitionSpec()
        mapped = map_over_mesh(self._mesh, function, same, same)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.eval_shape(mapped, *operands),
        )

    def _find_residuals(self, stage: int, operands: StageOperands) -> StageResiduals:
        found: list[StageResiduals] = []

        def trace(*operands: Any) -> None:
            _, backward, _ = self.differentiate(stage, StageOperands(*operands))
            leaves, structure = jax.tree.flatten(backward)
            position = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(operands))}
            known = {
                i: position[id(leaf)]
                for i, leaf in enumerate(leaves)
                if id(leaf) in position
            }
            stored = tuple(i for i in range(len(leaves)) if i not in known)
            layout = packing.build_layout([jnp.asarray(leaves[i]) for i in stored])
            found.append(StageResiduals(structure, stored, known, layout))

        self._eval_shape(trace, *operands)
        if self.keeps_residuals:
            return found[0]
        return found[0]._replace(layout=packing.build_layout([]))

    def _split_backward(
        self, stage: int, operands: StageOperands, output: Any
    ) -> SplitBackward:
        """Divide the backward pass of a stage; `operands` and `output` are shapes."""
        places = self.residuals[stage].layout.slices
        stored = [jax.ShapeDtypeStruct(place.shape, place.dtype) for place in places]
        parts = (operands, stored, output)
        values, structure = jax.tree.flatten(parts)
        num_kept = len(values) - len(jax.tree.leaves(output))
        found: list[SplitBackward] = []

        def run(*values: Any) -> BackwardResults:
            operands, stored, gradient = jax.tree.unflatten(structure, values)
            return self._run_backward(stage, operands, stored, gradient)

        def trace(*values: Any) -> None:
            found.append(SplitBackward(run, values, num_kept))

        self._eval_shape(trace, *values)
        return found[0]

    def _run_backward(
        self, stage: int, operands: StageOperands, stored: Any, gradient: Any
    ) -> BackwardResults:
        backward = self.restore_backward(stage, operands, stored)
        of_params, *of_input = backward(gradient)
        if self.layout.model.stages.position_of(stage):
            return BackwardResults(of_input[0], of_params, of_input[0])
        # Nobody waits for the first stage. Its chain of gradients leads to its input or,
        # if this has none, to its first weights.
        ends = [g for g in jax.tree.leaves(of_input) if g.dtype != jax.dtypes.float0]
        names = layer_names(self.layout.model.layers[stage])
        first = next((name for name in names if of_params.get(name)), None)
        return BackwardResults((), of_params, ends or of_params.get(first))

    # --- running a stage ---

    def unpack_values(
        self, stage: int, params: Buffers, model_state: Buffers
    ) -> tuple[Tree, Tree]:
        """Unpack the weights and model state of a stage from its device's row."""
        return (
            packing.unpack(self.stage_layout("params", stage), params),
            packing.unpack(self.stage_layout("model_state", stage), model_state),
        )

    def stage_layout(self, kind: str, stage: int) -> BufferLayout:
        """Return where one kind of value of a stage is in its device's row."""
        rows, model = getattr(self.layout, kind), self.layout.model
        layout = rows.layouts[model.stages.device_of[stage]]
        return packing.select(layout, model.names(stage))

    def modes(self, stage: int) -> Tree:
        """Return the reduction modes of a stage's model state."""
        layout = self.stage_layout("model_state", stage)
        model_state = jax.tree.unflatten(
            layout.tree, [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in layout.slices]
        )
        return reduction_modes(self.step.model_state_reduction, model_state)

    def forward(self, stage: int) -> Callable[..., Any]:
        """Return a stage as ``operands -> (y, (contributions, info))``.

        The last stage returns the loss as `y`; only it has info.
        """
        compute = self.step.plan.types.compute
        is_last = stage == self.layout.model.stages.num_stages - 1
        modes, plan = self.modes(stage), self.step.plan
        count = plan.num_replicas * plan.batching.gradient_accumulation_count

        def run(params: Tree, model_state: Tree, x: Any, batch: Any, key: Array) -> Any:
            y, new = apply_layers(
                self.layout.model.layers[stage],
                narrow(params, compute),
                model_state,
                x,
                training=True,
                key=key,
            )
            new = check_model_state(new, model_state)
            contributions = model_state_contribution(modes, model_state, new, count)
            if not is_last:
                return y, (contributions, {})
            returned = self.loss.outputs(y, self.loss.targets(batch, key))
            loss, _, info = steps.unpack_loss_output(_as_loss_output(returned))
            info = steps.check_info(info, self.step.extra_info) | {"loss": loss}
            return loss, (contributions, info)

        return run

    def differentiate(self, stage: int, operands: StageOperands) -> Any:
        """Run a stage; return its output, its backward function and what it reports."""
        params, model_state, x, batch, key = operands
        run = self.forward(stage)
        if self.keeps_residuals:
            # Residuals are held for as long as a micro-batch is in flight, so store only
            # products. No CSE can undo this: the two passes run at different ticks.
            run = jax.checkpoint(run, policy=steps.save_products, prevent_cse=False)
        if self.layout.model.stages.position_of(stage) == 0 and not self.splits_backward:
            # Nobody needs the gradient of the batch.
            return jax.vjp(
                lambda params: run(params, model_state, x, batch, key), params, has_aux=True
            )
        return jax.vjp(
            lambda params, x: run(params, model_state, x, batch, key),
            params,
            x,
            has_aux=True,
        )

    def pack_residuals(self, stage: int, backward: Any) -> Buffers:
        """Pack the residuals of a backward function."""
        leaves, residuals = jax.tree.leaves(backward), self.residuals[stage]
        assert len(leaves) == residuals.structure.num_leaves, "traced as in _find_residuals"
        stored = [leaves[i] for i in residuals.stored]
        return packing.pack(residuals.layout, stored, self.residual_sizes)

    def unpack_residuals(self, stage: int, stored: Buffers) -> list[Any]:
        """Unpack the residuals of a backward function."""
        return packing.unpack(self.residuals[stage].layout, stored)

    def restore_backward(
        self, stage: int, operands: StageOperands, stored: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return the backward function of a stage, from its operands and its residuals."""
        if not self.keeps_residuals:
            return self.differentiate(stage, operands)[1]
        residuals = self.residuals[stage]
        leaves = dict(zip(residuals.stored, stored, strict=True))
        flat = jax.tree.leaves(operands)
        leaves |= {i: flat[position] for i, position in residuals.operands.items()}
        ordered = [leaves[i] for i in range(len(leaves))]
        return jax.tree.unflatten(residuals.structure, ordered)

    def pack_output(self, stage: int, y: Any) -> Buffers:
        """Pack the output of a stage as the output of its position.

        The branches of a concurrent layer are stages of one position. Each sends zeros in
        place of the others' outputs, and the receiver adds them up.
        """
        stages = self.layout.model.stages
        position = stages.position_of(stage)
        group, boundary = stages.groups[position], self.boundaries[position]
        if len(group) > 1:
            outputs = jax.tree.unflatten(boundary.tree, boundary.slices)
            y = tuple(
                y
                if other == stage
                else jax.tree.map(
                    lambda s: jnp.zeros(s.shape, s.dtype), slices, is_leaf=packing.is_slice
                )
                for other, slices in zip(group, outputs, strict=True)
            )
        return packing.pack(boundary, y, self.boundary_sizes)


def _as_loss_output(returned: Any) -> Any:
    """Return ``(loss, info)`` in the form of a loss function's output, to be checked."""
    try:
        loss, info = returned
    except (TypeError, ValueError) as error:
        raise TypeError(
            "LayeredLoss.outputs must return (loss, info): a scalar and a dict of scalars."
        ) from error
    return loss, (None, info)


def _check_differentiable(output: Any, layer: str) -> None:
    for leaf in jax.tree.leaves(output):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigurationError(
                f"The output of layer {layer} has {leaf.dtype} values. They have no "
                "gradient and cannot cross from one pipeline stage to the next. Split "
                "elsewhere, or keep them in the batch."
            )
