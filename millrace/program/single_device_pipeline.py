"""A pipeline whose stages all share one device.

Nothing can overlap there, so the stages simply run one after the other, whatever the
schedule: the plain loop, with stages as the units of recomputation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from millrace.nn.layers import Tree, apply_layers
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.stages import StagedModel, split_model
from millrace.program.step import Step, TrainState
from millrace.program.training import TrainingProgram


class OneDeviceProgram(TrainingProgram):
    """A training program that runs stage by stage on one device of each replica."""

    def __init__(self, step: Step, devices: Sequence[Any] | None) -> None:
        assert isinstance(step.loss_fn, LayeredLoss)
        self._staged = StagedLoss(step.loss_fn, step.plan)
        # The stages see to recomputation themselves.
        plan = dataclasses.replace(step.plan, recomputation=False)
        super().__init__(step._replace(loss_fn=self._staged, plan=plan), devices)

    def init(self, params: Any, model_state: Any = None, *, seed: int = 0) -> TrainState:
        """Cut the model into stages and place its weights; copies what is given."""
        self._staged.split(params, model_state or {})
        return super().init(params, model_state, seed=seed)


class StagedLoss:
    """A loss that runs stage by stage, and if asked keeps only what enters each."""

    def __init__(self, loss: LayeredLoss, plan: Plan) -> None:
        self._loss = loss
        self._plan = plan
        self._model: StagedModel | None = None

    def split(self, params: Tree, model_state: Tree) -> None:
        """Cut the model; before it can be called."""
        self._model = split_model(self._loss, self._plan, params, model_state)

    def __call__(self, params: Tree, model_state: Tree, batch: Any, key: jax.Array) -> Any:
        """Return what the loss returns."""
        assert self._model is not None, "split comes first"
        x, new = self._loss.inputs(batch, key), dict(model_state)
        for group in self._model.stages.groups:
            outputs = []
            for stage in group:
                own = [self._model.own(stage, tree) for tree in (params, model_state)]
                y, changed = self._runner(stage)(*own, x, key)
                outputs.append(y)
                new |= changed
            x = tuple(outputs) if len(group) > 1 else outputs[0]
        value, info = self._loss.outputs(x, self._loss.targets(batch, key))
        return value, (new, info)

    def _runner(self, stage: int) -> Callable[..., Any]:
        assert self._model is not None
        layers = self._model.layers[stage]

        def run(params: Tree, model_state: Tree, x: Any, key: jax.Array) -> Any:
            return apply_layers(layers, params, model_state, x, training=True, key=key)

        return jax.checkpoint(run) if self._plan.recomputation else run
