"""Ctrl-C to prompt: how long a training command takes to end, and what it leaves.

Each application is started in a terminal of its own, as a user does. Ctrl-C is pressed at a
random moment: while it starts, compiles, trains, validates or tests. The time until the
process has ended is measured, and a run that has made updates must have a checkpoint.

With --parallel, several commands run at a time, as users of one machine do: compilation
then takes longer, and so may the end. With --compile, every command starts with an empty
compilation cache. On a fast device, --epochs keeps commands from ending before Ctrl-C.
On one GPU with 16 cores, this takes about four minutes:

    python benchmarks/interrupts.py --longest 40 --parallel 8 --epochs 1000 --report

Target: at most 5 s.
"""

import argparse
import json
import os
import pty
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from harness import Result, build_parser, publish

_COMMANDS = {
    "cnn": "cnn train --model cifar_resnet8 --dataset cifar10 --synthetic-data host "
    "--micro-batch-size 128 --epochs 3 --validation True",
    "autoencoder": "autoencoder train --data random",
    "vcd": "vcd train --config digits_demo",
}
_CTRL_C = b"\x03"
_PHASES = ("waiting for the first data", "compiling", "training", "validating", "testing")
_START_SECONDS = 3.0
"""The first second or two belong to Python and its imports."""
_INTERRUPTED = 130
"""The exit status of a command that Ctrl-C has ended; any other is no measurement."""
_LONGEST_END = 60.0
"""Seconds after Ctrl-C after which a command is killed, and counts with that time."""


class Interrupt(NamedTuple):
    """One Ctrl-C, and what followed."""

    after: float
    """Seconds from the start to the key."""
    seconds: float
    """Seconds from the key to the end of the process."""
    status: int
    updates: int
    is_saved: bool
    """Whether there is a checkpoint of the last update, or nothing to save."""
    phase: str
    """What the command was doing when the key was pressed."""
    last_line: str


def interrupt(command: str, after: float, folder: Path, *, compiles: bool) -> Interrupt:
    """Start a command, press Ctrl-C, and wait for its end.

    With `compiles`, it finds no program in the compilation cache.
    """
    words = [sys.executable, "-m", "millrace", *command.split(), "--run-dir", str(folder)]
    # Several processes share a GPU.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ)
    if compiles:
        variables["XDG_CACHE_HOME"] = str(folder.with_name("cache"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, variables)
    screen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(terminal, screen), daemon=True)
    reader.start()
    time.sleep(after)
    phase = _find_phase(screen)
    pressed = time.perf_counter()
    os.write(terminal, _CTRL_C)
    killer = threading.Timer(_LONGEST_END, os.kill, (pid, signal.SIGKILL))
    killer.start()
    _, status = os.waitpid(pid, 0)
    killer.cancel()
    seconds = time.perf_counter() - pressed
    reader.join(5.0)
    os.close(terminal)
    summary = _read_summary(folder)
    updates = summary.get("updates", 0)
    name = f"update-{updates:09}"
    is_saved = not updates or any(folder.rglob(name))
    lines = b"".join(screen).decode(errors="replace").strip().splitlines() or [""]
    code = os.waitstatus_to_exitcode(status)
    last_line = lines[-1].strip()
    return Interrupt(after, seconds, code, updates, is_saved, phase, last_line)


def _find_phase(screen: list[bytes]) -> str:
    """Return the last of the phases that a command has shown."""
    text = b"".join(screen).decode(errors="replace")
    shown = {name: text.rfind(name) for name in _PHASES}
    last = max(shown, key=lambda name: shown[name])
    return last if shown[last] >= 0 else "starting"


def _read(terminal: int, screen: list[bytes]) -> None:
    """Read what appears in a terminal until it is closed."""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return
        if not part:
            return
        screen.append(part)


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(
    commands: dict[str, str], args: argparse.Namespace
) -> dict[str, list[Interrupt]]:
    """Interrupt each command at random moments."""

    def measure_one(command: str, after: float) -> Interrupt:
        if args.epochs:
            command += f" --epochs {args.epochs}"
        with tempfile.TemporaryDirectory() as folder:
            one = interrupt(command, after, Path(folder) / "run", compiles=args.compile)
        print(f"{command.split()[0]}: {one}", flush=True)
        return one

    with ThreadPoolExecutor(args.parallel) as pool:
        found = {}
        for seed, (name, command) in enumerate(commands.items()):
            moments = random.Random(seed)
            afters = [
                moments.uniform(_START_SECONDS, args.longest) for _ in range(args.rounds)
            ]
            found[name] = [pool.submit(measure_one, command, after) for after in afters]
        return {name: [one.result() for one in ends] for name, ends in found.items()}


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=20)
    parser.add_argument("--longest", type=float, default=60.0, help="seconds before Ctrl-C")
    parser.add_argument("--parallel", type=int, default=1, help="commands at a time")
    parser.add_argument("--epochs", type=int, help="epochs of every command")
    parser.add_argument("--compile", action="store_true", help="use no compilation cache")
    parser.add_argument("--only", choices=_COMMANDS, help="measure one application")
    args = parser.parse_args()
    chosen = {n: c for n, c in _COMMANDS.items() if args.only in (None, n)}
    found = measure(chosen, args)
    rows = []
    for name, interrupts in found.items():
        if wrong := {one.last_line for one in interrupts if one.status != _INTERRUPTED}:
            raise SystemExit(f"{name} did not end by Ctrl-C: {' | '.join(sorted(wrong))}")
        seconds = [one.seconds for one in interrupts]
        trained = [one for one in interrupts if one.updates]
        rows.append(
            {
                "application": name,
                "interrupts": str(len(interrupts)),
                "median s": f"{statistics.median(seconds):.2f}",
                "longest s": f"{max(seconds):.2f}",
                "while compiling": str(sum(one.phase == "compiling" for one in interrupts)),
                "after updates": str(len(trained)),
                "with checkpoint": str(sum(one.is_saved for one in trained)),
                "exit status": ", ".join(sorted({str(one.status) for one in interrupts})),
            }
        )
    slowest = max(one.seconds for interrupts in found.values() for one in interrupts)
    result = Result(
        name="interrupts",
        table=rows,
        ratio_name="longest time from Ctrl-C to the prompt, in seconds",
        ratio=slowest,
        target=5,
        at_least=False,
        explanation=(
            "A call takes a fifth of a second. What remains is the update in progress, "
            "writing the checkpoint, and the report of the run."
        ),
        numbers={n: [one._asdict() for one in made] for n, made in found.items()},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
