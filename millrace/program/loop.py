"""Any body, many times, in one compiled call."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.program.accumulate import path_name
from millrace.program.compiling import options_in_force


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


class LoopProgram:
    """A loop's body, compiled for each kind of carry and elements that it is given.

    Everything is compiled before it is called, so that the calls can be guarded: a body
    may read arrays while it is traced, and XLA reads those that it closes over.
    """

    def __init__(self, body: LoopBody) -> None:
        self._body = body
        # One jitted step, so that programs of several lengths trace the body once.
        self._step = jax.jit(functools.partial(_step, body))
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def holds(self, carry: Any) -> Callable[..., Any]:
        """Return the compiled condition: ``(carry) -> bool``."""
        key = "holds", _kind(carry)
        return self._get(key, functools.partial(_holds, self._body), carry)

    def up_to(
        self, carry: Any, data: Any, start: Any, capacity: int
    ) -> Callable[..., LoopResult]:
        """Return ``(carry, data, start, count)``, which makes up to `count` steps.

        It uses elements `start`, `start` + 1, … of `data`, and has room for the outputs
        of `capacity` steps. The count is not part of the program, so that any number of
        steps, a short last call included, is served by one compilation; on a GPU that
        costs some 10 us per step more than ``exactly``.
        """
        key = "up to", capacity, _kind((carry, data, start))
        function = functools.partial(_up_to, self._body, self._step, capacity)
        return self._get(key, function, carry, data, start, start)

    def exactly(
        self, carry: Any, data: Any, start: Any, length: int
    ) -> Callable[..., LoopResult]:
        """Return ``(carry, data, start)``, which makes exactly `length` steps."""
        key = "exactly", length, _kind((carry, data, start))
        function = functools.partial(_exactly, self._step, length)
        return self._get(key, function, carry, data, start)

    def output_bytes(self, carry: Any, data: Any) -> int:
        """Count the bytes of one step's output."""
        element = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
        _, output = jax.eval_shape(self._step, carry, element)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(output))

    def _get(self, key: Any, function: Callable[..., Any], *args: Any) -> Any:
        asked: dict[str, Any] = dict(options_in_force(jax.default_backend()))
        full_key = key, tuple(asked.items())
        if full_key not in self._compiled:
            jitted = jax.jit(function, **_options(key[0], *args))
            compiled = jitted.lower(*args).compile(compiler_options=asked)
            self._compiled[full_key] = compiled
        return self._compiled[full_key]


def _options(name: str, carry: Any, *rest: Any) -> dict[str, Any]:
    """The carry is used up, and comes back where it was; numbers are on every device."""
    if name == "holds":
        return {}
    # What lies on no particular device must not be tied to one.
    kept = jax.tree.map(lambda x: x.sharding if x.committed else None, carry)
    same: Any = rest[1].sharding if rest[1].committed else None
    return {"donate_argnums": 0, "out_shardings": LoopResult(kept, None, same, same)}


def _kind(tree: Any) -> Any:
    """Return all that a program depends on of its arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype, x.sharding, x.committed) for x in leaves)


def _up_to(
    body: LoopBody,
    step: Callable[..., Any],
    capacity: int,
    carry: Any,
    data: Any,
    start: jax.Array,
    count: jax.Array,
) -> LoopResult:
    carry_out, output = jax.eval_shape(step, carry, _element(data, start))
    check_carry(carry, carry_out)
    outputs = jax.tree.map(lambda o: jnp.zeros((capacity, *o.shape), o.dtype), output)

    def go_on(loop: Any) -> Any:
        index, carry, _ = loop
        return (index < count) & _holds(body, carry)

    def advance(loop: Any) -> Any:
        index, carry, outputs = loop
        carry, output = step(carry, _element(data, start + index))
        outputs = jax.tree.map(lambda all_, one: all_.at[index].set(one), outputs, output)
        return index + 1, carry, outputs

    first = (jnp.zeros_like(count), carry, outputs)
    steps, carry, outputs = lax.while_loop(go_on, advance, first)
    return LoopResult(carry, outputs, steps, _holds(body, carry))


def _exactly(
    step: Callable[..., Any], length: int, carry: Any, data: Any, start: jax.Array
) -> LoopResult:
    def advance(carry: Any, index: jax.Array) -> Any:
        carry_out, output = step(carry, _element(data, start + index))
        check_carry(carry, carry_out)
        return carry_out, output

    carry, outputs = lax.scan(advance, carry, jnp.arange(length, dtype=start.dtype))
    return LoopResult(carry, outputs, jnp.full_like(start, length), jnp.bool_(True))


def _holds(body: LoopBody, carry: Any) -> jax.Array:
    if body.condition is None:
        return jnp.bool_(True)
    return jnp.asarray(body.condition(carry), bool).reshape(())


def _step(body: LoopBody, carry: Any, element: Any) -> tuple[Any, Any]:
    result = body.function(carry, element) if body.with_element else body.function(carry)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "A loop's body must return (carry, output), with output None if there "
            f"is none; got {type(result).__name__}."
        )
    carry, output = result
    return carry, output if body.with_output else None


_programs: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""By what owns the body, then by what owns the condition."""


def loop_program(body: LoopBody) -> LoopProgram:
    """Return the program of a body, the same one as long as the body lives."""
    try:
        by_condition = _programs.setdefault(_owner(body.function), {})
        key = _part(body.function), body.with_element, body.with_output
        by_condition = by_condition.setdefault(key, weakref.WeakKeyDictionary())
        programs = by_condition.setdefault(_owner(body.condition or _always), {})
        key = _part(body.condition)
        if key not in programs:
            programs[key] = LoopProgram(_held_weakly(body))
        return programs[key]
    except TypeError:  # one that has no hash, or that nothing can refer to weakly
        return LoopProgram(body)


def _always(carry: Any) -> bool:
    raise AssertionError("stands for no condition, and is never called")


def _owner(function: Callable[..., Any]) -> Any:
    """Return what lives as long as a function; a bound method is made when asked for."""
    return function.__self__ if inspect.ismethod(function) else function


def _part(function: Callable[..., Any] | None) -> Any:
    return function.__func__ if inspect.ismethod(function) else None


def _held_weakly(body: LoopBody) -> LoopBody:
    """Return a body that does not keep its functions alive: its programs die with them."""
    condition = body.condition and _weak(body.condition)
    return body._replace(function=_weak(body.function), condition=condition)


def _weak(function: Callable[..., Any]) -> Callable[..., Any]:
    kind = weakref.WeakMethod if inspect.ismethod(function) else weakref.ref
    reference = kind(function)

    def call(*args: Any) -> Any:
        alive = reference()
        assert alive is not None, "the caller of a loop holds its body"
        return alive(*args)

    return call


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
