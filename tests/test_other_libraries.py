"""A model written in Flax trains as it is: the runtime takes any pure function."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import millrace as mr


@pytest.mark.devices(4)
def test_a_flax_nnx_model_with_batch_norm_trains_on_replicas():
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(4, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.last = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.norm(self.first(x))))

    graph, weights, statistics = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
    params, carried = nnx.to_pure_dict(weights), nnx.to_pure_dict(statistics)

    def loss_fn(params, carried, batch, key):
        nnx.replace_by_pure_dict(weights, params)
        nnx.replace_by_pure_dict(statistics, carried)
        model = nnx.merge(graph, weights, statistics)
        loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
        _, _, moved = nnx.split(model, nnx.Param, nnx.BatchStat)
        return loss, (nnx.to_pure_dict(moved), {})

    x = np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)
    source = mr.ArraySource({"x": x, "y": np.abs(x).sum(1, keepdims=True)})
    plan = mr.Plan(micro_batch_size=8, num_replicas=4)
    program = mr.training_program(loss_fn, optax.adam(1e-2), plan)
    state, outfeed = program.init(params, carried), mr.Outfeed()
    before = np.asarray(carried["norm"]["mean"])
    with mr.Infeed(mr.Stream(source, plan.batching.samples_per_step)) as infeed:
        state = mr.train(program, state, infeed=infeed, updates=60, outfeed=outfeed)
    losses = outfeed.dequeue()["loss"]
    assert losses[-10:].mean() < 0.2 * losses[:5].mean()
    assert not np.array_equal(state.carried["norm"]["mean"], before)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
