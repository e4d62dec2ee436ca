"""Write a function as StableHLO, with its weights inside, for any batch size."""

from collections.abc import Callable
from typing import Any

import jax
from jax import export

PLATFORMS = ("cpu", "cuda")


def build_program(function: Callable[[Any], Any], example: Any) -> bytes:
    """Return a function of one array as bytes, which ``jax.export.deserialize`` reads.

    Args:
        function: A pure function; it may have constants, such as weights.
        example: Shape and type of its input. The first dim is the batch, of any size.
    """
    (batch,) = export.symbolic_shape("batch")
    shape = (batch, *example.shape[1:])
    # A function of its own, because JAX caches what it has traced for a device.
    jitted = jax.jit(lambda x: function(x))
    program = export.export(jitted, platforms=PLATFORMS)
    return bytes(program(jax.ShapeDtypeStruct(shape, example.dtype)).serialize())
