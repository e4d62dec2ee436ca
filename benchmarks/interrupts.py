"""Ctrl-C to prompt: how long a training command takes to end, and what it leaves.

Each application is started in a terminal of its own, as a user does. Ctrl-C is pressed at a
random moment: while it starts, compiles, trains, validates or tests. The time until the
process has ended is measured, and a run that has made updates must have a checkpoint.

Target: at most 5 s.
"""

import json
import os
import pty
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import Result, build_parser, publish

_COMMANDS = {
    "cnn": "cnn train --model cifar_resnet8 --dataset cifar10 --synthetic-data host "
    "--micro-batch-size 128 --num-epochs 3 --validation True",
    "autoencoder": "autoencoder train --data random",
    "vcd": "vcd train --config digits_demo",
}
_CTRL_C = b"\x03"
_START_SECONDS = 3.0
"""The first second or two belong to Python and its imports."""


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
    last_line: str


def interrupt(command: str, after: float, folder: Path) -> Interrupt:
    """Start a command, press Ctrl-C, and wait for its end."""
    words = [sys.executable, "-m", "millrace", *command.split(), "--run-dir", str(folder)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    screen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(terminal, screen), daemon=True)
    reader.start()
    time.sleep(after)
    pressed = time.perf_counter()
    os.write(terminal, _CTRL_C)
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - pressed
    reader.join(5.0)
    os.close(terminal)
    summary = _read_summary(folder)
    updates = summary.get("updates", 0)
    name = f"update-{updates:09}"
    is_saved = not updates or any(folder.rglob(name))
    lines = b"".join(screen).decode(errors="replace").strip().splitlines() or [""]
    code = os.waitstatus_to_exitcode(status)
    return Interrupt(after, seconds, code, updates, is_saved, lines[-1].strip())


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


def measure(command: str, rounds: int, longest: float, seed: int) -> list[Interrupt]:
    """Interrupt a command at random moments."""
    moments = random.Random(seed)
    interrupts = []
    for number in range(rounds):
        after = moments.uniform(_START_SECONDS, longest)
        with tempfile.TemporaryDirectory() as folder:
            interrupts.append(interrupt(command, after, Path(folder) / "run"))
        print(f"{number + 1}/{rounds} {command.split()[0]}: {interrupts[-1]}", flush=True)
    return interrupts


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=20)
    parser.add_argument("--longest", type=float, default=60.0, help="seconds before Ctrl-C")
    parser.add_argument("--only", choices=_COMMANDS, help="measure one application")
    args = parser.parse_args()
    chosen = {n: c for n, c in _COMMANDS.items() if args.only in (None, n)}
    found = {
        name: measure(command, args.rounds, args.longest, seed)
        for seed, (name, command) in enumerate(chosen.items())
    }
    rows = []
    for name, interrupts in found.items():
        seconds = [one.seconds for one in interrupts]
        trained = [one for one in interrupts if one.updates]
        rows.append(
            {
                "application": name,
                "interrupts": str(len(interrupts)),
                "median s": f"{statistics.median(seconds):.2f}",
                "longest s": f"{max(seconds):.2f}",
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
