"""Two hosts on one machine: network namespaces that a virtual cable connects.

Each host has its own addresses, host name and ``/etc/hosts``; files and clocks are shared.
Needs root and Debian's iproute2.
"""

import os
import shutil
import subprocess
from pathlib import Path

import launched

ADDRESSES = {"node-a": "10.231.7.1", "node-b": "10.231.7.2"}
_ETC = Path("/etc/netns")
"""``ip netns exec`` mounts the files of a namespace from here over those of /etc."""


def why_not() -> str | None:
    """Return why this machine cannot make hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "ip is not installed: apt-get install -y iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"millrace-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else made.stderr.strip()


class Hosts:
    """Two hosts with a cable between them.

    Args:
        own_name_is_loopback: Whether a host resolves its own name to 127.0.1.1, as the
            installer of Debian has it.
    """

    def __init__(self, *, own_name_is_loopback: bool = False) -> None:
        self._namespaces = {name: f"millrace-{os.getpid()}-{name}" for name in ADDRESSES}
        for name, namespace in self._namespaces.items():
            _ip("netns", "add", namespace)
            seen = ADDRESSES | ({name: "127.0.1.1"} if own_name_is_loopback else {})
            lines = [f"{address} {host}\n" for host, address in seen.items()]
            _ETC.joinpath(namespace).mkdir(parents=True)
            text = "".join(["127.0.0.1 localhost\n", *lines])
            _ETC.joinpath(namespace, "hosts").write_text(text)
        one, other = self._namespaces.values()
        ends = ("name", "cable", "netns", one), ("name", "cable", "netns", other)
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, namespace in self._namespaces.items():
            _ip("-n", namespace, "address", "add", f"{ADDRESSES[name]}/24", "dev", "cable")
            _ip("-n", namespace, "link", "set", "lo", "up")
            self.connect(name)

    def start(self, name: str, command: list[str]) -> subprocess.Popen:
        """Start a command on a host."""
        enter = ["ip", "netns", "exec", self._namespaces[name], "unshare", "--uts"]
        named = ["sh", "-c", f'hostname {name} && exec "$@"', "sh"]
        return launched.start([*enter, *named, *command])

    def cut(self, name: str) -> None:
        """Unplug the cable of a host."""
        _ip("-n", self._namespaces[name], "link", "set", "cable", "down")

    def connect(self, name: str) -> None:
        """Plug it in."""
        _ip("-n", self._namespaces[name], "link", "set", "cable", "up")

    def close(self) -> None:
        """Remove the hosts; their processes must have ended."""
        for namespace in self._namespaces.values():
            _ip("netns", "delete", namespace)
            shutil.rmtree(_ETC / namespace)
        if not any(_ETC.iterdir()):
            _ETC.rmdir()


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
