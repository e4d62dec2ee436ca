"""Ports of this machine on which the coordinator may listen."""

import os
import socket


def free_port() -> int:
    """Find a port that nobody uses. Another may take it before we do; it seldom happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def why_not_free(host: str, port: int) -> str | None:
    """Return why a process of ours cannot listen there; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # A connection that has just been closed does not keep us from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return os.strerror(error.errno or 0)
    return None
