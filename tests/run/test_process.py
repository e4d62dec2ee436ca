"""Checks before a run starts."""

import resource
import types

import jax
import pytest

from millrace.config import ConfigurationError
from millrace.run.options import RunOptions
from millrace.run.process import check_address_space, prepare_process


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 2 * 10**9])
def test_enough_address_space_is_accepted(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check_address_space()


def test_too_little_address_space_is_an_error_instead_of_a_crash(monkeypatch):
    queried = []
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: queried.append(what) or (1_536_000_000, -1)
    )
    with pytest.raises(ConfigurationError, match=r"limited to 1\.5 GB.*ulimit -v"):
        check_address_space()
    assert queried == [resource.RLIMIT_AS]


@pytest.mark.cpu("virtual devices are CPU devices")
def test_virtual_devices_that_the_process_has_already_may_be_asked_for_again():
    count = jax.local_device_count()  # a resumed run takes the option from the first one
    config = types.SimpleNamespace(run=RunOptions(virtual_devices=count))
    assert prepare_process(config) is config
    config = types.SimpleNamespace(run=RunOptions(virtual_devices=count + 1))
    with pytest.raises(ConfigurationError, match="before any device is used"):
        prepare_process(config)
