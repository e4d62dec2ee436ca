"""A machine finds its address that other machines reach."""

import pytest

from millrace.distributed import addresses
from millrace.distributed.addresses import choose_address, find_address_toward


def test_a_machine_reaches_itself_over_the_loopback():
    assert find_address_toward("127.0.0.1") == "127.0.0.1"
    assert find_address_toward("no-such-host.invalid") is None


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("10.0.0.2", ["127.0.1.1", "10.0.0.2"], "10.0.0.2"),
        ("127.0.1.1", ["127.0.1.1", None, "10.0.0.2"], "10.0.0.1"),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        ("::1", ["::1", "fd00::2%eth0"], "fd00::1"),
        (None, [None, "10.0.0.2"], None),
    ],
)
def test_an_address_that_others_reach_is_preferred(own, others, expected, monkeypatch):
    toward = {"10.0.0.2": "10.0.0.1", "fd00::2%eth0": "fd00::1"}
    monkeypatch.setattr(addresses, "find_address_toward", toward.get)
    assert choose_address(own, others) == expected
