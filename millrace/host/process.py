"""Settings of this process that make training on CPU faster."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def tune_memory_allocation() -> bool:
    """Keep freed memory for the next temporary instead of returning it to the kernel.

    glibc maps every large array anew, and each page of it faults once: convolutions with
    large temporaries ran 2 to 4 times faster with these settings. Call it before JAX is
    used. Returns whether there was a glibc to tell.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = [
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
    ]
    return all([mallopt(name, value) for name, value in settings])
