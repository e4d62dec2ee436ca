import threading

import jax
import numpy as np
import pytest

import millrace as mr
from millrace.feeds.threads import _SETTINGS, with_settings
from millrace.loop.activity import run_stoppable
from millrace.loop.evaluate import AsyncValidation

OTHER = {
    "jax_enable_x64": True,
    "jax_default_device": jax.devices()[-1],
    "jax_default_matmul_precision": "float32",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
}


def read_on_thread(name):
    found = []
    read = with_settings(lambda: found.append(getattr(jax.config, name)))
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0]


def read_while_stoppable(name):
    return run_stoppable(lambda: getattr(jax.config, name))


def read_in_validation(name):
    validation = AsyncValidation(
        lambda state: state, lambda state: {"value": getattr(jax.config, name)}
    )
    validation.start(None, 1)
    collected = validation.collect(wait=True)
    validation.close()
    assert collected is not None
    return collected[1]["value"]


@pytest.mark.parametrize("read", [read_on_thread, read_while_stoppable, read_in_validation])
@pytest.mark.parametrize("name", _SETTINGS)
def test_a_thread_has_the_settings_of_the_one_that_starts_it(name, read):
    before = getattr(jax.config, name)
    assert read(name) == before
    with _SETTINGS[name](OTHER[name]):
        assert read(name) == OTHER[name] != before
    assert read(name) == before


def test_elements_keep_64_bits_where_they_are_enabled():
    with jax.enable_x64(True), mr.Infeed([np.full(2, 0.1)]) as infeed:
        chunk = infeed.chunk(1)
        assert chunk is not None
        assert chunk.data.dtype == np.float64
        assert (np.asarray(chunk.data) == 0.1).all()
