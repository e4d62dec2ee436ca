"""Translate a function to an ONNX graph, one JAX operation after the other.

What depends only on constants is computed here, so that the graph has only what remains.
Broadcasting is left to the operations of ONNX where they do it themselves.
"""

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.extend import core

OPSET = 17
_IR_VERSION = 8  # of the first release with this opset
_CALLS = ("call_jaxpr", "jaxpr", "fun_jaxpr")
_IDENTITIES = {"copy", "copy_p", "name", "stop_gradient", "optimization_barrier"}
_ELEMENTWISE = {
    **{"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow"},
    **{"max": "Max", "min": "Min", "neg": "Neg", "abs": "Abs", "sign": "Sign"},
    **{"exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "erf": "Erf"},
    **{"logistic": "Sigmoid", "floor": "Floor", "ceil": "Ceil", "sin": "Sin", "cos": "Cos"},
    **{"eq": "Equal", "lt": "Less", "le": "LessOrEqual"},
    **{"gt": "Greater", "ge": "GreaterOrEqual", "not": "Not", "and": "And", "or": "Or"},
}
_REDUCTIONS = {"reduce_max": "ReduceMax", "reduce_min": "ReduceMin"}


class UnsupportedOperation(ValueError):
    """A function uses an operation that has no translation."""


class _Tensor(NamedTuple):
    """A value that is computed in the graph."""

    name: str
    is_full: bool = True
    """Whether it has its whole shape, or dims of size 1 that are still to be expanded."""


_Value = _Tensor | np.ndarray


def build_model(
    function: Callable[..., Any], example: Any, *, names: tuple[str, str]
) -> bytes:
    """Return the ONNX model of a function from one array to another.

    Args:
        function: A pure function; it may have constants, such as weights.
        example: Shape and type of its input. The first dim is the batch, of any size.
        names: Names of the input and of the output.
    """
    (batch,) = export.symbolic_shape("batch")
    example = jax.ShapeDtypeStruct((batch, *example.shape[1:]), example.dtype)
    # A function of its own, because JAX caches what it has traced for a device.
    closed = jax.make_jaxpr(lambda x: function(x))(example)
    if len(closed.jaxpr.outvars) != 1:
        raise UnsupportedOperation("An ONNX model must return a single array.")
    graph = _Graph(names)
    (result,) = graph.add_jaxpr(closed.jaxpr, closed.consts, [_Tensor(names[0])])
    output: Any = closed.jaxpr.outvars[0].aval
    return graph.finish(example, output, graph.expand(result, output.shape))


class _Graph:
    """The nodes and constants of a graph."""

    def __init__(self, names: tuple[str, str]) -> None:
        from onnx import helper, numpy_helper  # pyright: ignore[reportMissingImports]

        self._helper, self._numpy_helper = helper, numpy_helper
        self._input, self._output = names
        self._nodes: list[Any] = []
        self._constants: dict[str, np.ndarray] = {}
        self._batch: str | None = None
        self._count = 0

    def finish(self, example: Any, output: Any, result: str) -> bytes:
        """Return the serialized model."""
        self._nodes.append(self._helper.make_node("Identity", [result], [self._output]))
        used = {name for node in self._nodes for name in node.input}
        graph = self._helper.make_graph(
            self._nodes,
            "model",
            [self._describe(self._input, example)],
            [self._describe(self._output, output)],
            [
                self._numpy_helper.from_array(array, name)
                for name, array in self._constants.items()
                if name in used
            ],
        )
        opset = self._helper.make_opsetid("", OPSET)
        model = self._helper.make_model(
            graph, opset_imports=[opset], producer_name="millrace", ir_version=_IR_VERSION
        )
        return model.SerializeToString()

    def _describe(self, name: str, array: Any) -> Any:
        shape = [size if isinstance(size, int) else "batch" for size in array.shape]
        return self._helper.make_tensor_value_info(name, self._kind(array.dtype), shape)

    def _kind(self, dtype: Any) -> int:
        return self._helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

    # Values

    def add(self, operation: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        self._count += 1
        name = f"{operation.lower()}_{self._count}"
        node = self._helper.make_node(operation, inputs, [name], name=name, **attributes)
        self._nodes.append(node)
        return name

    def constant(self, array: Any) -> str:
        """Add a constant; return its name."""
        self._count += 1
        name = f"constant_{self._count}"
        self._constants[name] = np.ascontiguousarray(array).reshape(np.shape(array))
        return name

    def transpose_dims(self, name: str, order: Sequence[int]) -> str:
        """Return the name of a transposed value; a constant is transposed at once."""
        if (array := self._constants.get(name)) is not None:
            return self.constant(array.transpose(order))
        return self.add("Transpose", [name], perm=list(order))

    def name(self, value: _Value) -> str:
        """Return the name of a value as it is, with dims of size 1 left unexpanded."""
        return value.name if isinstance(value, _Tensor) else self.constant(value)

    def expand(self, value: _Value, shape: Sequence[Any]) -> str:
        """Return the name of a value in its whole shape."""
        if not isinstance(value, _Tensor) or value.is_full:
            return self.name(value)
        return self.add("Expand", [value.name, self._shape(shape)])

    def _shape(self, shape: Sequence[Any]) -> str:
        """Return the name of a shape; the graph finds the size of the batch itself."""
        if all(isinstance(size, int) for size in shape):
            return self.constant(np.array(shape, np.int64))
        if self._batch is None:
            ends = [self.constant(np.array([n], np.int64)) for n in (0, 1)]
            self._batch = self.add("Slice", [self.add("Shape", [self._input]), *ends])
        parts = [
            self.constant(np.array([size], np.int64))
            if isinstance(size, int)
            else self._batch
            for size in shape
        ]
        return self.add("Concat", parts, axis=0)

    # Equations

    def add_jaxpr(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[_Value]
    ) -> list[_Value]:
        """Add the operations of a function; return its results."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {
            variable: np.asarray(const)
            for variable, const in zip(jaxpr.constvars, consts, strict=True)
        }

        def read(variable: Any) -> _Value:
            is_literal = isinstance(variable, core.Literal)
            return np.asarray(variable.val) if is_literal else values[variable]

        for equation in jaxpr.eqns:
            results = self._add_equation(equation, [read(v) for v in equation.invars])
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _add_equation(self, equation: Any, values: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        for key in _CALLS:
            if (inner := params.get(key)) is not None:
                return self.add_jaxpr(inner.jaxpr, inner.consts, values)
        if name in _IDENTITIES:
            return values
        sizes = [size for v in equation.outvars for size in v.aval.shape]
        is_known = all(isinstance(value, np.ndarray) for value in values)
        if is_known and all(isinstance(size, int) for size in sizes):
            return self._compute(equation, values)
        if name in _ELEMENTWISE or name in _COMPOSITES:
            return [self._add_elementwise(equation, values)]
        if name == "broadcast_in_dim":
            return [self._add_broadcast(equation, values[0])]
        if (translate := _TRANSLATIONS.get(name)) is None:
            raise UnsupportedOperation(
                f"The operation {name} of JAX has no translation to ONNX here. Export the "
                "function as stablehlo instead."
            )
        shapes = [variable.aval.shape for variable in equation.invars]
        full = [self.expand(v, s) for v, s in zip(values, shapes, strict=True)]
        return [_Tensor(translate(self, equation, full))]

    def _compute(self, equation: Any, values: list[_Value]) -> list[_Value]:
        found = equation.primitive.bind(*values, **equation.params)
        several = equation.primitive.multiple_results
        return [np.asarray(jax.device_get(x)) for x in (found if several else [found])]

    def _add_elementwise(self, equation: Any, values: list[_Value]) -> _Tensor:
        name = equation.primitive.name
        names = [self.name(value) for value in values]
        shape = equation.outvars[0].aval.shape
        # A scalar has its whole shape only if the result is one.
        is_full = any(
            value.is_full if isinstance(value, _Tensor) else value.shape == tuple(shape)
            for value in values
        )
        if name in _COMPOSITES:
            return _Tensor(_COMPOSITES[name](self, equation, names), is_full)
        return _Tensor(self.add(_ELEMENTWISE[name], names), is_full)

    def _add_broadcast(self, equation: Any, value: _Value) -> _Tensor:
        shape, places = equation.params["shape"], equation.params["broadcast_dimensions"]
        given = equation.invars[0].aval.shape
        if isinstance(value, np.ndarray):
            kept: list[int] = [1] * len(shape)
            for size, place in zip(given, places, strict=True):
                kept[place] = size
            return _Tensor(self.constant(value.reshape(kept)), is_full=False)
        added = [n for n in range(len(shape)) if n not in places]
        name = value.name
        if added:
            name = self.add("Unsqueeze", [name, self.constant(np.array(added, np.int64))])
        is_same = [given[n] == shape[p] for n, p in enumerate(places)]
        ones = all(shape[n] == 1 for n in added)
        return _Tensor(name, is_full=value.is_full and all(is_same) and ones)

    # Translations, each from a graph, an equation and the names of its inputs to a name

    def convert(self, equation: Any, names: list[str]) -> str:
        kind = self._kind(equation.params["new_dtype"])
        return self.add("Cast", names, to=kind)

    def scalar(self, equation: Any, value: float) -> str:
        return self.constant(np.array(value, equation.outvars[0].aval.dtype))

    def select(self, equation: Any, names: list[str]) -> str:
        if len(names) != 3:
            raise UnsupportedOperation("A selection between more than two arrays.")
        which, if_false, if_true = names
        return self.add("Where", [which, if_true, if_false])

    def reshape(self, equation: Any, names: list[str]) -> str:
        sizes = equation.outvars[0].aval.shape
        unknown = [size for size in sizes if not isinstance(size, int)]
        if len(unknown) > 1:
            raise UnsupportedOperation(f"A reshape to {sizes} has more than one free dim.")
        shape = [size if isinstance(size, int) else -1 for size in sizes]
        return self.add("Reshape", [names[0], self.constant(np.array(shape, np.int64))])

    def transpose(self, equation: Any, names: list[str]) -> str:
        return self.transpose_dims(names[0], equation.params["permutation"])

    def concatenate(self, equation: Any, names: list[str]) -> str:
        return self.add("Concat", names, axis=equation.params["dimension"])

    def slice(self, equation: Any, names: list[str]) -> str:
        params, shape = equation.params, equation.invars[0].aval.shape
        strides = params["strides"] or (1,) * len(shape)
        dims = [
            n
            for n, size in enumerate(shape)
            if (params["start_indices"][n], params["limit_indices"][n], strides[n])
            != (0, size, 1)
        ]
        chosen = [
            [params["start_indices"][n] for n in dims],
            [params["limit_indices"][n] for n in dims],
            dims,
            [strides[n] for n in dims],
        ]
        if not all(isinstance(n, int) for some in chosen for n in some):
            raise UnsupportedOperation("A slice of the batch.")
        numbers = [self.constant(np.array(some, np.int64)) for some in chosen]
        return self.add("Slice", [names[0], *numbers])

    def reduce(self, equation: Any, names: list[str]) -> str:
        axes, name = list(equation.params["axes"]), equation.primitive.name
        if name == "reduce_sum":
            axes_name = self.constant(np.array(axes, np.int64))
            return self.add("ReduceSum", [names[0], axes_name], keepdims=0)
        return self.add(_REDUCTIONS[name], names, axes=axes, keepdims=0)

    def pool(self, equation: Any, names: list[str]) -> str:
        params = equation.params
        window, strides = params["window_dimensions"], params["window_strides"]
        dilations = {*params["base_dilation"], *params["window_dilation"]}
        if len(window) != 4 or window[0] != 1 or window[3] != 1 or dilations != {1}:
            raise UnsupportedOperation("A pool that is not over height and width.")
        pads = params["padding"]
        first = self.transpose_dims(names[0], (0, 3, 1, 2))
        pooled = self.add(
            "MaxPool",
            [first],
            kernel_shape=list(window[1:3]),
            strides=list(strides[1:3]),
            pads=[pads[1][0], pads[2][0], pads[1][1], pads[2][1]],
        )
        return self.transpose_dims(pooled, (0, 2, 3, 1))

    def convolve(self, equation: Any, names: list[str]) -> str:
        params = equation.params
        layout = params["dimension_numbers"]
        if params["batch_group_count"] != 1 or set(params["lhs_dilation"]) != {1}:
            raise UnsupportedOperation("A transposed convolution.")
        x = self.transpose_dims(names[0], layout.lhs_spec)
        kernel = self.transpose_dims(names[1], layout.rhs_spec)
        pads = params["padding"]
        y = self.add(
            "Conv",
            [x, kernel],
            strides=list(params["window_strides"]),
            dilations=list(params["rhs_dilation"]),
            pads=[*(low for low, _ in pads), *(high for _, high in pads)],
            group=params["feature_group_count"],
        )
        back = [layout.out_spec.index(n) for n in range(len(layout.out_spec))]
        return self.transpose_dims(y, back)

    def multiply(self, equation: Any, names: list[str]) -> str:
        (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
        ranks = [len(variable.aval.shape) for variable in equation.invars]
        is_plain = left == (ranks[0] - 1,) and right == (0,) and ranks[1] == 2
        if is_plain and not left_batch:
            return self.add("MatMul", names)
        letters = iter(string.ascii_letters)
        first = [next(letters) for _ in range(ranks[0])]
        second = [next(letters) for _ in range(ranks[1])]
        for n, m in zip((*left_batch, *left), (*right_batch, *right), strict=True):
            second[m] = first[n]
        batch = [first[n] for n in left_batch]
        kept = [x for n, x in enumerate(first) if n not in (*left_batch, *left)]
        kept += [x for n, x in enumerate(second) if n not in (*right_batch, *right)]
        terms = f"{''.join(first)},{''.join(second)}->{''.join(batch + kept)}"
        return self.add("Einsum", names, equation=terms)

    # Elementwise operations of several nodes

    def rsqrt(self, equation: Any, names: list[str]) -> str:
        return self.add("Reciprocal", [self.add("Sqrt", names)])

    def square(self, equation: Any, names: list[str]) -> str:
        return self.add("Mul", [names[0], names[0]])

    def expm1(self, equation: Any, names: list[str]) -> str:
        return self.add("Sub", [self.add("Exp", names), self.scalar(equation, 1)])

    def log1p(self, equation: Any, names: list[str]) -> str:
        return self.add("Log", [self.add("Add", [names[0], self.scalar(equation, 1)])])

    def erfc(self, equation: Any, names: list[str]) -> str:
        return self.add("Sub", [self.scalar(equation, 1), self.add("Erf", names)])

    def integer_pow(self, equation: Any, names: list[str]) -> str:
        power = self.scalar(equation, equation.params["y"])
        return self.add("Pow", [names[0], power])

    def unequal(self, equation: Any, names: list[str]) -> str:
        return self.add("Not", [self.add("Equal", names)])


_COMPOSITES = {
    "rsqrt": _Graph.rsqrt,
    "square": _Graph.square,
    "expm1": _Graph.expm1,
    "log1p": _Graph.log1p,
    "erfc": _Graph.erfc,
    "integer_pow": _Graph.integer_pow,
    "ne": _Graph.unequal,
    "select_n": _Graph.select,
    "convert_element_type": _Graph.convert,
}
_TRANSLATIONS = {
    "reshape": _Graph.reshape,
    "squeeze": _Graph.reshape,
    "expand_dims": _Graph.reshape,
    "transpose": _Graph.transpose,
    "concatenate": _Graph.concatenate,
    "slice": _Graph.slice,
    "reduce_sum": _Graph.reduce,
    "reduce_max": _Graph.reduce,
    "reduce_min": _Graph.reduce,
    "reduce_window_max": _Graph.pool,
    "conv_general_dilated": _Graph.convolve,
    "dot_general": _Graph.multiply,
}
