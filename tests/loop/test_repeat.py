"""``mr.repeat`` and ``mr.while_loop``."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr
from millrace.program.loop import LoopProgram


class Ones:
    """Endless pairs of 800 ones."""

    def __iter__(self):
        while True:
            ones = np.ones(800, np.float32)
            yield {"x1": ones, "x2": ones}


def body(carry, batch):
    return carry + 1, {"d1": batch["x1"] + batch["x2"], "d2": batch["x1"] - batch["x2"]}


def test_the_published_example_gives_its_results():
    outfeed = mr.Outfeed()
    with mr.Infeed(Ones()) as infeed:
        count = mr.repeat(10, body, 0, infeed=infeed, outfeed=outfeed)
    result = outfeed.dequeue()
    assert int(count) == 10
    assert result["d1"].shape == result["d2"].shape == (10, 800)
    assert (result["d1"] == 2).all() and (result["d2"] == 0).all()


def test_the_body_is_traced_once_for_any_n():
    traces = 0

    def counted(carry, batch):
        nonlocal traces
        traces += 1
        return body(carry, batch)

    with mr.Infeed(Ones()) as infeed:
        for n in (1, 10, 300, 7):
            mr.repeat(n, counted, 0, infeed=infeed, outfeed=mr.Outfeed())
    assert traces == 1


@pytest.mark.parametrize("steps", [1, 4, 10, 25])
def test_steps_per_execution_changes_nothing_but_the_calls(steps):
    outfeed = mr.Outfeed()
    count = mr.repeat(
        10, lambda c: (c + 1, c * c), 0, outfeed=outfeed, steps_per_execution=steps
    )
    assert int(count) == 10
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(10) ** 2)


def test_outputs_of_one_execution_take_at_most_16_mib(monkeypatch):
    room, up_to = [], LoopProgram.up_to

    def record(program, carry, data, start, capacity):
        room.append(capacity)
        return up_to(program, carry, data, start, capacity)

    monkeypatch.setattr(LoopProgram, "up_to", record)
    for size in (1 << 20, 1 << 24):
        outfeed = mr.Outfeed()
        mr.repeat(2, lambda c, n=size: (c + 1, jnp.zeros(n, "uint8")), 0, outfeed=outfeed)
    assert room == [16, 1]


def test_zero_steps_return_the_carry():
    assert float(mr.repeat(0, lambda c: (c + 1, None), 3.0)) == 3.0


def test_while_stops_when_the_condition_no_longer_holds():
    outfeed = mr.Outfeed()
    end = mr.while_loop(lambda c: c < 1000, lambda c: (c * 2, c), 1, outfeed=outfeed)
    assert int(end) == 1024
    np.testing.assert_array_equal(outfeed.dequeue(), 2 ** np.arange(10))


def test_while_takes_only_the_elements_it_used():
    with mr.Infeed([np.float32(i) for i in range(100)]) as infeed:
        total = mr.while_loop(
            lambda c: c < 10, lambda c, x: (c + x, None), 0.0, infeed=infeed
        )
        assert (float(total), infeed.position) == (10.0, 5)


def test_while_stops_at_the_maximum():
    end = mr.while_loop(
        lambda c: c >= 0, lambda c: (c + 1, None), 0, maximum_iterations=1000
    )
    assert int(end) == 1000


def test_arrays_of_the_caller_stay_usable():
    start = jnp.zeros(5)
    mr.repeat(3, lambda c: (c + 1, None), start)
    assert float(start.sum()) == 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda c: c + 1, r"must return \(carry, output\)"),
        (lambda c: ((c, c), None), "carry of the structure"),
        (lambda c: (c + 0.5, None), r"from int32\[\] to float32\[\]"),
    ],
)
@pytest.mark.parametrize("steps", [None, 2])
def test_a_body_that_breaks_the_contract_is_refused_with_the_reason(wrong, message, steps):
    with pytest.raises(TypeError, match=message):
        mr.repeat(3, wrong, 0, steps_per_execution=steps)


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        mr.repeat(-1, lambda c: (c, None), 0)
    with pytest.raises(ValueError, match="steps_per_execution must be at least 1"):
        mr.repeat(1, lambda c: (c, None), 0, steps_per_execution=0)
    with pytest.raises(ValueError, match="maximum_iterations"):
        mr.while_loop(lambda c: True, lambda c: (c, None), 0, maximum_iterations=-1)


def test_while_does_not_read_data_it_will_not_use():
    exactly = [np.float32(1)] * 5
    end = mr.while_loop(
        lambda c: c < 5, lambda c, x: (c + x, None), 0.0, infeed=mr.Infeed(exactly)
    )
    assert float(end) == 5.0
    none = mr.while_loop(
        lambda c: c < 0, lambda c, x: (c + x, None), 0.0, infeed=mr.Infeed([])
    )
    assert float(none) == 0.0


def test_the_body_is_traced_once_for_two_lengths_of_execution():
    traces = 0

    def counted(carry):
        nonlocal traces
        traces += 1
        return carry + 1, carry

    mr.repeat(10, counted, 0, steps_per_execution=4, outfeed=mr.Outfeed())
    assert traces == 1


@pytest.mark.devices(4)
def test_a_loop_runs_on_the_default_device_or_that_of_its_carry():
    device = jax.devices()[3]
    numbers = [np.float32(n) for n in range(6)]
    with jax.default_device(device), mr.Infeed(numbers) as infeed:
        total = mr.repeat(3, lambda c, x: (c + x, None), 0.0, infeed=infeed)
    assert total == 3 and total.devices() == {device}
    with mr.Infeed(numbers) as infeed:
        first = jax.device_put(np.float32(1), device)
        total = mr.repeat(4, lambda c, x: (c + x, None), first, infeed=infeed)
    assert total == 7 and total.devices() == {device}
    assert mr.while_loop(lambda c: c < 9, lambda c: (c + 2, None), first) == 9


@pytest.mark.parametrize("count", [2.5, "3", None])
def test_a_number_of_steps_must_be_a_whole_number(count):
    with pytest.raises(TypeError, match="n must be a whole number"):
        mr.repeat(count, lambda c: (c, None), 0)
    assert mr.repeat(np.int64(3), lambda c: (c + 1, None), 0) == 3


def test_a_body_may_close_over_arrays_and_read_them_while_it_is_traced():
    weights, scale, key = jnp.full((3, 3), 2.0), jnp.float32(0.5), jax.random.key(0)

    def scaled(carry):
        noise = jax.random.normal(key, (3,))
        return carry @ weights * float(scale), carry + noise - noise

    for steps in (None, 2):
        outfeed = mr.Outfeed()
        end = mr.repeat(
            4, scaled, np.ones(3, np.float32), outfeed=outfeed, steps_per_execution=steps
        )
        np.testing.assert_allclose(end, 81.0)
        assert outfeed.dequeue().shape == (4, 3)
    assert mr.while_loop(lambda c: c < scale * 9, lambda c: (c + scale, None), 0.0) == 4.5


def test_outputs_can_be_read_under_a_transfer_guard_of_the_caller():
    outfeed = mr.Outfeed()
    start = jnp.int32(0)
    with jax.transfer_guard("disallow"):
        mr.repeat(5, lambda c: (c + 1, c), start, outfeed=outfeed)
        np.testing.assert_array_equal(outfeed.dequeue(), np.arange(5))


def sharded(values, spec, axis_types):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_types,) * 2, devices=jax.devices()[:4])
    return jax.device_put(values, jax.NamedSharding(mesh, jax.P(*spec)))


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("spec", "steps", "axis_types"),
    [
        (("x", "y"), None, jax.sharding.AxisType.Auto),
        ((), 3, jax.sharding.AxisType.Auto),
        ((None, "y"), 3, jax.sharding.AxisType.Explicit),
        ((), None, jax.sharding.AxisType.Explicit),
    ],
)
def test_a_carry_may_be_on_several_devices(spec, steps, axis_types):
    first = np.arange(8, dtype=np.float32).reshape(4, 2)
    carry = {"split": sharded(first, spec, axis_types), "count": 0}
    elements = [np.full((4, 2), i, np.float32) for i in range(10)]

    def step(carry, x):
        new = {"split": carry["split"] * 0.5 + x, "count": carry["count"] + 1}
        return new, new["split"].sum()

    outfeed = mr.Outfeed()
    with mr.Infeed(elements) as infeed:
        end = mr.repeat(
            7, step, carry, infeed=infeed, outfeed=outfeed, steps_per_execution=steps
        )
    expected, sums = first, []
    for x in elements[:7]:
        expected = expected * 0.5 + x
        sums.append(expected.sum())
    assert end["split"].sharding.is_equivalent_to(carry["split"].sharding, 2)
    assert end["count"] == 7
    np.testing.assert_allclose(end["split"], expected, rtol=1e-6)
    np.testing.assert_allclose(outfeed.dequeue(), sums, rtol=1e-6)


@pytest.mark.devices(4)
def test_while_takes_a_carry_on_several_devices():
    carry = sharded(np.ones((4, 2), np.float32), ("x",), jax.sharding.AxisType.Auto)
    end = mr.while_loop(lambda c: c.sum() < 100, lambda c: (c * 2, None), carry)
    assert end.sharding == carry.sharding
    np.testing.assert_array_equal(end, np.full((4, 2), 16.0))


def test_programs_compiled_for_a_body_are_freed_with_it():
    class Owner:
        def body(self, carry):
            return carry + self.step, None

        def condition(self, carry):
            return carry < 3

    def once(owner):
        captured = owner.step  # may be large

        def body(carry):
            return carry + captured, None

        mr.repeat(3, body, 0.0)
        mr.repeat(3, owner.body, 0.0)
        mr.while_loop(owner.condition, owner.body, 0.0)
        mr.while_loop(lambda c: c < 2, body, 0.0, maximum_iterations=5)
        return weakref.ref(body)

    before = None
    for _ in range(3):
        owner = Owner()
        owner.step = jnp.float32(1)
        references = [weakref.ref(owner), weakref.ref(owner.step), once(owner)]
        del owner
        gc.collect()
        assert [reference() for reference in references] == [None] * 3
        living = len(jax.devices()[0].client.live_executables())
        assert before is None or living <= before
        before = living


def test_methods_and_unhashable_callables_can_be_bodies():
    class Counter:
        traces = 0

        def step(self, carry):
            self.traces += 1
            return carry + 1, None

        def __eq__(self, other):  # removes the hash
            return self is other

        __call__ = step

    class Hashed(Counter):
        __hash__ = object.__hash__

    hashed, plain = Hashed(), Counter()
    for _ in range(3):
        assert mr.repeat(2, hashed.step, 0) == mr.repeat(2, plain, 0) == 2
    assert hashed.traces == 1


@pytest.mark.parametrize("carry", [0.0, np.zeros(3)])
def test_a_loop_inside_a_jit_is_refused(carry):
    for loop in (
        lambda c: mr.repeat(3, lambda c: (c + 1, None), c),
        lambda c: mr.while_loop(lambda c: c < 3, lambda c: (c + 1, None), c),
    ):
        with pytest.raises(TypeError, match=r"cannot be called inside jax\.jit"):
            jax.jit(loop)(carry)
        with pytest.raises(TypeError, match=r"cannot be called inside jax\.jit"):
            jax.jit(lambda unused, loop=loop: loop(0))(carry)
