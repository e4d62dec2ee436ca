"""Any body, many times, in one compiled call."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.program.accumulate import path_name


class LoopBody(NamedTuple):
    """What a loop repeats: ``(carry[, element]) -> (carry, output)``."""

    function: Callable[..., Any]
    condition: Callable[[Any], Any] | None
    with_element: bool
    with_output: bool


class LoopResult(NamedTuple):
    """What one call of the compiled loop gives back."""

    carry: Any
    outputs: Any
    steps: jax.Array
    more: jax.Array
    """Whether the condition still holds; always, where there is none."""


@functools.partial(jax.jit, static_argnames=("body", "capacity"), donate_argnums=0)
def run_steps(
    carry: Any,
    data: Any,
    start: jax.Array,
    count: jax.Array,
    *,
    body: LoopBody,
    capacity: int,
) -> LoopResult:
    """Run up to `count` steps on elements `start`, `start` + 1, … of `data`.

    The count is not part of the program, so that any number of steps, a short last
    call included, is served by one compilation; on a GPU that costs some 10 us per step
    more than ``scan_steps``.
    """
    step = _stepper(body)
    carry_out, output = jax.eval_shape(step, carry, _element(data, start))
    check_carry(carry, carry_out)
    outputs = jax.tree.map(lambda o: jnp.zeros((capacity, *o.shape), o.dtype), output)

    def go_on(loop: Any) -> Any:
        index, carry, _ = loop
        return (index < count) & holds(body, carry)

    def advance(loop: Any) -> Any:
        index, carry, outputs = loop
        carry, output = step(carry, _element(data, start + index))
        outputs = jax.tree.map(lambda all_, one: all_.at[index].set(one), outputs, output)
        return index + 1, carry, outputs

    first = (jnp.zeros_like(count), carry, outputs)
    steps, carry, outputs = lax.while_loop(go_on, advance, first)
    return LoopResult(carry, outputs, steps, holds(body, carry))


@functools.partial(jax.jit, static_argnames=("body", "length"), donate_argnums=0)
def scan_steps(
    carry: Any, data: Any, start: jax.Array, *, body: LoopBody, length: int
) -> LoopResult:
    """Run exactly `length` steps; the length is part of the program."""
    step = _stepper(body)

    def advance(carry: Any, index: jax.Array) -> Any:
        carry_out, output = step(carry, _element(data, start + index))
        check_carry(carry, carry_out)
        return carry_out, output

    carry, outputs = lax.scan(advance, carry, jnp.arange(length, dtype=start.dtype))
    return LoopResult(carry, outputs, jnp.full_like(start, length), jnp.bool_(True))


def holds(body: LoopBody, carry: Any) -> jax.Array:
    """Evaluate the loop's condition."""
    if body.condition is None:
        return jnp.bool_(True)
    return jnp.asarray(body.condition(carry), bool).reshape(())


def output_bytes(body: LoopBody, carry: Any, data: Any) -> int:
    """Count the bytes of one step's output."""
    element = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    _, output = jax.eval_shape(_stepper(body), carry, element)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(output))


@functools.lru_cache(maxsize=256)
def _stepper(body: LoopBody) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One jitted step per body, so that programs of several lengths trace it once."""
    return jax.jit(_step(body))


def _step(body: LoopBody) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(carry: Any, element: Any) -> tuple[Any, Any]:
        result = (
            body.function(carry, element) if body.with_element else body.function(carry)
        )
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "A loop's body must return (carry, output), with output None if there "
                f"is none; got {type(result).__name__}."
            )
        carry, output = result
        return carry, output if body.with_output else None

    return step


def _element(data: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), data)


def check_carry(before: Any, after: Any) -> None:
    """A loop's carry keeps its structure, shapes and types from step to step."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            "The body must return a carry of the structure it was given: "
            f"{jax.tree.structure(before)}, got {jax.tree.structure(after)}."
        )
    named = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(named, jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TypeError(
                f"The body changed the carry{' ' + path_name(path) if path else ''} from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}; a "
                "compiled loop needs it the same at every step. (0 is a whole number; "
                "start from 0.0 for a float.)"
            )
