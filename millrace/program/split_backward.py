"""Divide a backward pass into the gradients of inputs and the gradients of weights.

Backpropagation through a stage does two kinds of work: it passes a gradient on from layer
to layer, up to the input of the stage, which the stage before waits for; and it combines
the gradients on this chain with activations into gradients of weights, which nobody waits
for. Both are in one list of operations. It is divided here, so that the second part can run
later. No product or convolution is computed twice; what follows from kept values without
one is computed again, as recomputation does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from millrace.program import packing

_CONTAINERS = {
    **{"jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"},
    **{"closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"},
    **{"custom_vjp_call": "call_jaxpr"},
}
"""Operations made of others, and the parameter that has these."""
_REARRANGING = frozenset(
    ("broadcast_in_dim", "convert_element_type", "iota", "reshape", "squeeze", "transpose")
)
"""Operations that are cheaper to repeat than to keep the results of."""
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))

_Environment = dict[Any, Any]


class BackwardResults(NamedTuple):
    """What a backward pass returns."""

    sent: Any
    """Gradients that other stages wait for."""
    weights: Any
    """Gradients of the weights."""
    ends: Any
    """Where the chain of gradients ends: those sent or, in a stage that sends none, those
    of its input or its first weights. They only say which operations form the chain."""


class SplitBackward:
    """A backward pass in two parts.

    Args:
        function: The whole pass, from the leaves of what it reads to ``BackwardResults``.
        values: Shapes of these leaves.
        num_kept: How many of them, from the first on, the second part can still read.
    """

    def __init__(
        self,
        function: Callable[..., BackwardResults],
        values: Sequence[Any],
        num_kept: int,
    ) -> None:
        self._jaxpr, results = _trace(function, values)
        self._sent, weights, ends = results
        self._weights, self._weights_tree = jax.tree.flatten(weights)
        others = [v for v in self._weights if v not in ends]
        chain = self._find_operations(ends) & self._find_operations(others)
        self._chain = chain | self._find_operations(self._sent)
        rest = self._find_operations(self._weights, and_effects=True) - self._chain
        kept = set(self._jaxpr.jaxpr.invars[:num_kept])
        self._deferred, repeated = self._find_deferred(rest, kept)
        self._rest = rest | repeated
        self.layout = packing.build_layout([v.aval for v in self._deferred])
        """Where the values that the second part needs from the first are in a buffer."""

    def pass_on(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the first part; return the gradients to send, and what the second needs."""
        environment = self._evaluate(self._chain, values)
        sent, deferred = self._sent, self._deferred
        return [_read(environment, v) for v in sent], [environment[v] for v in deferred]

    def compute_weights(self, values: Sequence[Any], deferred: Iterable[Any]) -> Any:
        """Run the second part, from the values that are kept, which come first."""
        known = dict(zip(self._deferred, deferred, strict=True))
        environment = self._evaluate(self._rest, values, known)
        leaves = [_read(environment, v) for v in self._weights]
        return jax.tree.unflatten(self._weights_tree, leaves)

    def _evaluate(
        self,
        chosen: set[int],
        values: Sequence[Any],
        known: Mapping[Any, Any] | None = None,
    ) -> _Environment:
        jaxpr = self._jaxpr.jaxpr
        environment = dict(zip(jaxpr.invars[: len(values)], values, strict=True))
        environment |= zip(jaxpr.constvars, self._jaxpr.consts, strict=True)
        environment |= known or {}
        for index in sorted(chosen):
            _evaluate(jaxpr.eqns[index], environment)
        return environment

    def _find_operations(
        self, results: Iterable[Any], *, and_effects: bool = False
    ) -> set[int]:
        """Return the operations that results depend on and, if asked, all with effects."""
        wanted, found = set(filter(_is_variable, results)), set()
        for index, eqn in reversed(list(enumerate(self._jaxpr.jaxpr.eqns))):
            if wanted.intersection(eqn.outvars) or (and_effects and eqn.effects):
                found.add(index)
                wanted.update(filter(_is_variable, eqn.invars))
        return found

    def _find_deferred(self, rest: set[int], kept: set[Any]) -> tuple[list[Any], set[int]]:
        """Return the values to keep from the first part, and operations to repeat."""
        eqns = self._jaxpr.jaxpr.eqns
        maker = {v: index for index, eqn in enumerate(eqns) for v in eqn.outvars}
        there = kept | set(self._jaxpr.jaxpr.constvars)
        follows = _find_following(eqns, there)
        deferred: dict[Any, None] = {}
        repeated: set[int] = set()
        missing = [v for index in sorted(rest) for v in eqns[index].invars] + self._weights
        while missing:
            v = missing.pop()
            if not _is_variable(v) or v in there or maker.get(v) in rest | repeated:
                continue
            if v in maker and (v in follows or _is_repeated(eqns[maker[v]])):
                repeated.add(maker[v])
                missing += eqns[maker[v]].invars
            else:
                deferred[v] = None
        return list(deferred), repeated


def _trace(function: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the operations of a function in one list, and the variables of its results."""
    jaxpr = jax.make_jaxpr(function)(*values)

    def flat(*values: Any) -> list[Any]:
        return _evaluate_all(jaxpr.jaxpr, jaxpr.consts, values)

    shapes = jax.eval_shape(function, *values)
    inlined = jax.make_jaxpr(flat)(*values)
    variables = jax.tree.unflatten(jax.tree.structure(shapes), inlined.jaxpr.outvars)
    sent, weights, ends = variables
    return inlined, (jax.tree.leaves(sent), weights, jax.tree.leaves(ends))


def _evaluate_all(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    environment = dict(zip(jaxpr.constvars, consts, strict=True))
    environment |= zip(jaxpr.invars, values, strict=True)
    for eqn in jaxpr.eqns:
        _evaluate(eqn, environment)
    return [_read(environment, v) for v in jaxpr.outvars]


def _evaluate(eqn: Any, environment: _Environment) -> None:
    """Add the results of an operation to the environment."""
    values = [_read(environment, v) for v in eqn.invars]
    with eqn.ctx.manager:
        if eqn.primitive.name in _CONTAINERS:
            inner = eqn.params[_CONTAINERS[eqn.primitive.name]]
            consts = inner.consts if isinstance(inner, core.ClosedJaxpr) else ()
            results = _evaluate_all(getattr(inner, "jaxpr", inner), consts, values)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*values, **params)
            results = results if eqn.primitive.multiple_results else [results]
    environment.update(zip(eqn.outvars, results, strict=True))


def _is_variable(v: Any) -> bool:
    return not isinstance(v, core.Literal)


def _read(environment: _Environment, v: Any) -> Any:
    return environment[v] if _is_variable(v) else v.val


def _find_following(eqns: Sequence[Any], known: set[Any]) -> set[Any]:
    """Return the variables that follow from known ones without products and effects."""
    follows = set(known)
    for eqn in eqns:
        is_cheap = eqn.primitive.name not in _PRODUCTS and not eqn.effects
        is_cheap &= not any(core.jaxprs_in_params(eqn.params))
        if is_cheap and all(v in follows for v in eqn.invars if _is_variable(v)):
            follows.update(eqn.outvars)
    return follows - known


def _is_repeated(eqn: Any) -> bool:
    """Whether the second part repeats an operation instead of keeping its results."""
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars):
        return True  # random keys, which cannot be packed
    return eqn.primitive.name in _REARRANGING and _count_bytes(eqn.invars) <= _count_bytes(
        eqn.outvars
    )


def _count_bytes(variables: Sequence[Any]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
