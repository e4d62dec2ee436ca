"""The address of this machine at which the other processes of a run reach it."""

import ipaddress
import socket
from collections.abc import Sequence


def find_address_toward(host: str) -> str | None:
    """Return the address from which this machine sends to `host`; None without a route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(
            host.strip("[]"), 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return None


def choose_address(own: str | None, others: Sequence[str | None]) -> str | None:
    """Return the address at which the others reach this process; None if unknown.

    On Debian, a machine resolves its own name to a loopback address, which only it reaches.

    Args:
        own: The address from which this process sends to process 0.
        others: Those of all processes.
    """
    if own is None or not is_loopback(own):
        return own
    for other in others:
        if other is not None and not is_loopback(other):
            return find_address_toward(other)
    return own


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
