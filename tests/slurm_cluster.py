"""A Slurm cluster of one node in a folder: its own key, ports, controller and daemon.

Needs Debian's ``slurm-wlm`` and ``munge``, and root. Nothing is installed or configured
outside of the folder.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import launched

from millrace.distributed.hardware import find_free_port

INSTALL = "apt-get install -y slurm-wlm munge"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_CPUS = 8
"""More than the machine has: tasks share its cores."""

_CONFIG = """\
ClusterName=millrace
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,preempt_reorder_count=1
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=high Nodes=ALL State=UP PriorityTier=10
"""


def why_not() -> str | None:
    """Return why this machine cannot start a cluster, or None if it can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed: {INSTALL}"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """A running cluster; ``close`` ends it.

    Args:
        folder: An empty folder for its configuration, state and logs. Its path must be
            short, because it has a socket.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen] = []
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        """Environment variables with which Slurm's commands find this cluster."""
        host = socket.gethostname().partition(".")[0]
        text = _CONFIG.format(
            folder=folder,
            host=host,
            controller_port=find_free_port(),
            daemon_port=find_free_port(),
            cpus=_CPUS,
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        try:
            self._start("munged", "--foreground", "--force", *self._munge_options())
            self._wait_until(lambda: (folder / "munge.socket").exists())
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", host)
            self._wait_until(lambda: "idle" in self.call("sinfo", "-h", "-o", "%t"))
        except BaseException:
            self.close()
            raise

    def _munge_options(self) -> list[str]:
        names = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        return [f"--{option}={self._folder / name}" for option, name in names.items()]

    def _environment(self) -> dict[str, str]:
        return launched.environment() | self.variables

    def _start(self, *command: str) -> None:
        log = (self._folder / f"{command[0]}.output").open("w")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT
                )
            )

    def _wait_until(self, condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            for daemon in self._daemons:
                assert daemon.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of all logs."""
        paths = [*self._folder.glob("*.log"), *self._folder.glob("*.output")]
        return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in paths)

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it prints, on either stream."""
        done = subprocess.run(
            command,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """Return what ``scontrol`` says about a job."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, state: str, *, restarts: int = 0, seconds=180) -> None:
        """Wait until a job has a state, and was started again at least `restarts` times."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.show(job)
            if shown.get("JobState") == state and int(shown["Restarts"]) >= restarts:
                return
            assert time.monotonic() < deadline, f"{shown}\n{self.logs()}"
            time.sleep(0.2)

    def close(self) -> None:
        """End all jobs and daemons."""
        if len(self._daemons) == 3:
            self.call("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
