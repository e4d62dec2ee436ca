"""Optimizer state in host memory, updated in buckets."""

import jax
import jax.numpy as jnp
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    loss_fn,
    make_model_state,
    make_params,
    train_with,
)

from millrace.plan import Plan
from millrace.program import offload
from millrace.program.training import training_program


def test_state_is_in_host_memory_except_for_counters():
    plan = Plan(micro_batch_size=GLOBAL_BATCH, optimizer_state_offloading=True)
    state, _, _ = train_with(plan)
    kinds = {
        leaf.size > 1000: leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(state.optimizer_state)
    }
    assert kinds == {True: "pinned_host", False: "device"}
    assert {p.sharding.memory_kind for p in jax.tree.leaves(state.params)} == {"device"}


def test_the_smallest_array_in_host_memory_can_be_chosen():
    """The largest bias has 40 float32 numbers, 160 bytes; the smallest kernel has 800."""
    options = {"micro_batch_size": GLOBAL_BATCH, "optimizer_state_offloading": True}
    smallest = {}
    for size in (0, 161, 801):
        plan = Plan(**options, min_remote_tensor_size=size)
        state, _, _ = train_with(plan)
        smallest[size] = min(
            leaf.nbytes
            for leaf in jax.tree.leaves(state.optimizer_state)
            if leaf.sharding.memory_kind == "pinned_host"
        )
    assert smallest == {0: 20, 161: 800, 801: 1920}
    with pytest.raises(ValueError, match="0 bytes or more, got -1"):
        Plan(min_remote_tensor_size=-1)


def test_offloading_on_a_cpu_says_that_it_saves_nothing(caplog):
    plan = Plan(micro_batch_size=GLOBAL_BATCH, optimizer_state_offloading=True)
    training_program(loss_fn, optax.sgd(0.1), plan)
    on_cpu = jax.default_backend() == "cpu"
    assert ("saves no memory on CPU" in caplog.text) == on_cpu


def test_buckets_own_disjoint_state(monkeypatch):
    monkeypatch.setattr(offload, "_BUCKET_BYTES", 8000)
    created = []
    original = offload.StreamedUpdate

    class Spy(original):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            created.append(self)

    monkeypatch.setattr(offload, "StreamedUpdate", Spy)
    plan = Plan(micro_batch_size=GLOBAL_BATCH, optimizer_state_offloading=True)
    state, _, _ = train_with(plan, optimizer=optax.adam(1e-2))
    (stream,) = created
    owned = offload._owned_positions(state, plan)
    streamed = {p for p, size in owned.items() if size}
    per_bucket = [streamed & set(bucket.outputs) for bucket in stream.buckets]
    assert sum(map(len, per_bucket)) == len(streamed) == 2  # mu and nu of one kernel
    every = [position for bucket in stream.buckets for position in bucket.outputs]
    assert sorted(every) == list(range(len(every)))


def test_an_optimizer_that_combines_variables_has_one_bucket():
    together = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0))
    adam = optax.adam(1e-2)
    jitted = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    for optimizer, expected in ((adam, 6), (jitted, 6), (together, 1)):
        plan = Plan(micro_batch_size=GLOBAL_BATCH)
        program = training_program(loss_fn, optimizer, plan)
        state = program.init(make_params(), make_model_state())
        owned = {p: 1 << 30 for p in offload._owned_positions(state, plan)}
        result = offload.GradientResult(
            state.params, state.model_state, {"loss": jnp.float32(0)}
        )
        step = program._step
        jaxpr = jax.make_jaxpr(
            lambda s, g, step=step: offload.steps.apply_update(step, s, g)
        )(state, result)
        groups = offload._split_outputs(offload.input_dependencies(jaxpr), owned)
        with_weights = [g for g in groups if set(g) & set(owned)]
        assert len(with_weights) == expected


def test_a_device_without_host_memory_warns_that_offloading_is_off(monkeypatch, caplog):
    monkeypatch.setattr(offload, "host_memory_kind", lambda device: None)
    plan = Plan(micro_batch_size=GLOBAL_BATCH, optimizer_state_offloading=True)
    state, _, _ = train_with(plan)
    assert "offloading is off" in caplog.text
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer_state)}
    assert kinds == {"device"}
