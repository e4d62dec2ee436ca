"""Dynamic loss scaling, update by update."""

import jax.numpy as jnp
import numpy as np
import pytest

from millrace.program.loss_scale import LossScale, adjust, all_finite, initial_loss_scale


def scale(factor, good=0, skipped=0):
    return LossScale(jnp.float32(factor), jnp.int32(good), jnp.int32(skipped))


def numbers(scale):
    return tuple(float(x) for x in scale)


@pytest.mark.parametrize(
    ("before", "finite", "after"),
    [
        (scale(1024, 7, 2), True, (1024, 8, 2)),
        (scale(1024, 7, 2), False, (512, 0, 3)),  # counted from the start again
        (scale(1024, 1998), True, (1024, 1999, 0)),
        (scale(1024, 1999), True, (2048, 0, 0)),
        (scale(1024, 1999), False, (512, 0, 1)),
        (scale(2.0**24, 1999), True, (2.0**24, 0, 0)),  # as large as it gets
        (scale(2.0**23, 1999), True, (2.0**24, 0, 0)),
        (scale(1), False, (1, 0, 1)),  # as small as it gets
        (scale(2), False, (1, 0, 1)),
    ],
)
def test_the_factor_halves_on_an_overflow_and_doubles_after_2000_updates(
    before, finite, after
):
    assert numbers(adjust(before, jnp.bool_(finite))) == after


@pytest.mark.parametrize(
    ("setting", "factor"), [(0.0, 1), (128.0, 128), ("dynamic", 2**15)]
)
def test_the_factor_starts_as_the_plan_says(setting, factor):
    assert numbers(initial_loss_scale(setting)) == (factor, 0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_anywhere(bad):
    tree = {"a": jnp.ones(3), "b": [jnp.ones((2, 2))]}
    assert all_finite(tree)
    assert all_finite({})
    assert not all_finite({**tree, "b": [jnp.ones((2, 2)).at[1, 0].set(bad)]})
    assert not all_finite({**tree, "a": jnp.ones(3).at[2].set(bad)})
