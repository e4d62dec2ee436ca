"""Make the transfer guard check reads of arrays on the CPU as it does on a GPU.

Under ``jax.transfer_guard("disallow")`` a GPU raises for every array that is read without
``jax.device_get``. On the CPU nothing is copied, so the guard raises nothing, and a mistake
that ends a run on a GPU would pass all tests. (Copies from the host to the device raise on
the CPU too.)

Subprocesses, and guard levels that only log, are not covered.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def strict_reads() -> Iterator[None]:
    """Check reads in all tests of the session."""
    with checked_reads():
        yield


@contextlib.contextmanager
def checked_reads() -> Iterator[None]:
    """Raise for implicit reads that the guard of this thread disallows."""
    from jax._src.array import ArrayImpl

    # All conversions (NumPy, float(), item(), format(), pickle) end in `_value`. So does
    # `device_get`, during which JAX sets a flag.
    value: Any = ArrayImpl.__dict__["_value"]
    methods = ("copy_to_host_async", "__dlpack__")
    originals = {name: ArrayImpl.__dict__[name] for name in methods}
    ArrayImpl._value = property(_checked(value.fget))
    for name, method in originals.items():
        setattr(ArrayImpl, name, _checked(method))
    try:
        with _no_buffer_protocol(ArrayImpl):
            yield
    finally:
        ArrayImpl._value = value
        for name, method in originals.items():
            setattr(ArrayImpl, name, method)


def _checked(function: Any) -> Any:
    @functools.wraps(function)
    def read(array: Any, *args: Any, **options: Any) -> Any:
        if _is_disallowed():
            from jax.errors import JaxRuntimeError

            raise JaxRuntimeError(
                "INVALID_ARGUMENT: Disallowed device-to-host transfer: "
                f"shape={array.shape}, dtype={array.dtype}, device={array.sharding} "
                "(on a GPU; read it with jax.device_get)"
            )
        return function(array, *args, **options)

    return read


def _is_disallowed() -> bool:
    from jax._src.config import guard_lib

    here = guard_lib.thread_local_state()
    level = here.device_to_host or guard_lib.global_state().device_to_host
    levels = guard_lib.TransferGuardLevel
    if level == levels.DISALLOW:
        return not here.explicit_device_get
    return level == levels.DISALLOW_EXPLICIT


@contextlib.contextmanager
def _no_buffer_protocol(cls: type) -> Iterator[None]:
    """Remove the buffer protocol from a class; an array on a GPU has none.

    ``np.asarray`` prefers it to ``__array__``. Python before 3.12 has no method for it that
    could be replaced, so this clears the slot in the type object.
    """
    tp_as_buffer = 20  # its offset in PyTypeObject, in words, from Python 3.8 to 3.14
    words = ctypes.cast(id(cls), ctypes.POINTER(ctypes.c_void_p))
    getbuffer = ctypes.cast(words[tp_as_buffer], ctypes.POINTER(ctypes.c_void_p))
    original = getbuffer[0]
    getbuffer[0] = None
    try:
        yield
    finally:
        getbuffer[0] = original
