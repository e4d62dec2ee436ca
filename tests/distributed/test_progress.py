"""Progress: the process for which the others wait, and a run in which nothing moves."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.distributed import progress
from millrace.distributed.progress import (
    Activity,
    Progress,
    Watch,
    count_step,
    describe_stuck,
    move,
    own_activity,
    reach_update,
    watched,
    write_stacks,
)
from millrace.loop.staging import Calls
from millrace.run.stuck import watching_progress


def training(steps: int) -> Activity:
    return Activity(steps, update=10 * steps, phase="training", moves=steps)


def progress_after(*steps: int, at: float = 0.0) -> Progress:
    seen = Progress(len(steps), at)
    for rank, count in enumerate(steps):
        seen.update(rank, training(count), at)
    return seen


# A process that makes the others wait


def test_a_process_that_has_staged_fewer_chunks_for_too_long_is_slow():
    seen = progress_after(5, 4, 5)
    assert seen.find_slow(119.0) is None
    assert seen.find_slow(121.0) == (1, 121.0)


def test_processes_that_all_wait_for_their_devices_are_not_slow():
    assert progress_after(5, 5, 5).find_slow(1e6) is None


def test_a_slow_process_is_named_again_only_after_a_step():
    seen = progress_after(5, 4)
    assert seen.find_slow(200.0) is not None
    assert seen.find_slow(300.0) is None
    seen.update(1, training(5), 301.0)
    seen.update(0, training(7), 301.0)
    assert seen.find_slow(302.0) is None
    assert seen.find_slow(301.0 + 3 * 301 + 1) is not None


def test_with_long_steps_it_takes_longer_to_count_as_slow():
    seen = progress_after(0, 0)
    for rank in range(2):
        seen.update(rank, training(1), 100.0)
    seen.update(0, training(2), 101.0)
    assert seen.find_slow(100.0 + 299) is None
    assert seen.find_slow(100.0 + 301) == (1, 301.0)


def test_nobody_is_slow_because_this_process_was_suspended():
    seen = progress_after(5, 4)
    seen.restart_clock(500.0)
    assert seen.find_slow(510.0) is None


# A run in which nothing moves


@pytest.fixture
def limit(tmp_path):
    with watched(60.0, tmp_path, lambda: False):
        yield


def test_nothing_is_stuck_while_any_process_moves(limit):
    seen = progress_after(5, 4)
    seen.update(0, training(5)._replace(moves=6), 50.0)
    assert seen.find_stuck(100.0) is None
    stuck = seen.find_stuck(111.0)
    assert stuck is not None and (stuck.ranks, stuck.seconds) == ((1,), 111.0)


def test_whoever_is_behind_is_named_and_otherwise_all(limit):
    behind = progress_after(5, 4, 5).find_stuck(61.0)
    assert behind is not None
    line = describe_stuck(behind, {1: "Process 1 (pid 7 on far)"})
    assert line == (
        "No progress for 61 s, waiting for Process 1 (pid 7 on far): training after "
        "update 40."
    )
    together = progress_after(5, 5).find_stuck(61.0)
    assert together is not None
    assert "wait for one another (0 training after update 50, 1 tr" in describe_stuck(
        together, {}
    )


@pytest.mark.parametrize(
    "other", [{"is_excused": True}, {"phase": ""}], ids=["compiling", "not in training"]
)
def test_a_process_that_cannot_be_watched_excuses_all(limit, other):
    seen = progress_after(5, 5)
    for now in range(0, 200, 10):
        seen.update(1, training(5)._replace(**other), float(now))
    assert seen.find_stuck(199.0) is None
    assert seen.find_stuck(199.0 + 61) is None or other == {"is_excused": True}


@pytest.mark.parametrize(
    ("timeout", "num_processes", "seconds"),
    [(None, 1, None), (0.0, 2, None), (None, 2, 1800), (45.0, 1, 45), (45.0, 2, 45)],
)
def test_the_default_depends_on_the_number_of_processes(
    timeout, num_processes, seconds, tmp_path
):
    with watched(timeout, tmp_path, lambda: False):
        seen = progress_after(*[5] * num_processes)
        assert (seen.find_stuck(1e8) is None) == (seconds is None)
        if seconds is not None:
            assert seen.find_stuck(seconds - 1.0) is None
            assert seen.find_stuck(seconds + 1.0) is not None


def test_by_default_a_step_may_take_ten_times_the_longest(tmp_path):
    with watched(None, tmp_path, lambda: False):
        seen = progress_after(0, 0)
        for rank in range(2):
            seen.update(rank, training(1), 1000.0)
        assert seen.find_stuck(1000.0 + 9_999) is None
        assert seen.find_stuck(1000.0 + 10_001) is not None


def test_calls_of_any_length_are_watched_from_the_first_results_on(tmp_path):
    with watched(None, tmp_path, lambda: False, excuses_first_call=True):
        progress.enter_phase("training")
        seen, hour = Progress(2, 0.0), 3600.0
        for now in (0.0, 1.0):  # staged ahead
            count_step()
            update_all(seen, now)
        update_all(seen, 1.9 * hour)
        assert seen.find_stuck(2 * hour) is None
        reach_update(own_activity().update + 100)
        update_all(seen, 2 * hour)
        assert seen.find_stuck(21 * hour) is None
        stuck = seen.find_stuck(23 * hour)
        assert stuck is not None and stuck.ranks == (0, 1)


def update_all(seen: Progress, now: float) -> None:
    for rank in range(2):
        seen.update(rank, own_activity(), now)


@pytest.mark.parametrize(("timeout", "is_found"), [(None, False), (60.0, True)])
def test_a_timeout_of_the_user_also_limits_the_first_call(timeout, is_found, tmp_path):
    with watching_progress(timeout, tmp_path, lambda _: None, has_long_calls=True):
        progress.enter_phase("training")
        seen = Progress(2, 0.0)
        update_all(seen, 0.0)
        update_all(seen, 4000.0)
        assert (seen.find_stuck(4000.0) is not None) == is_found


def test_a_single_process_is_watched_by_a_thread(tmp_path):
    lines, called = [], threading.Event()

    def on_stuck(line):
        lines.append(line)
        called.set()

    with watched(0.2, tmp_path, lambda: False):
        progress.enter_phase("training")
        watch = Watch(on_stuck, poll_seconds=0.02)
        assert called.wait(10)
        watch.close()
        assert lines[0].startswith("No progress for 0 s: training after update")
        lines.clear()
        watch = Watch(on_stuck, poll_seconds=0.02)
        for _ in range(20):
            threading.Event().wait(0.03)
            move()
        watch.close()
    assert lines == []


def test_the_file_has_all_threads_and_children(tmp_path):
    release = threading.Event()

    def wait_in_a_thread_of_its_own():
        release.wait()

    thread = threading.Thread(target=wait_in_a_thread_of_its_own)
    thread.start()
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline()
        with watched(None, tmp_path, lambda: False):
            path = write_stacks(3)
        assert path == tmp_path / "stuck-process-3.txt"
        text = path.read_text()
        assert f"pid {os.getpid()}: " in text
        assert "in wait_in_a_thread_of_its_own" in text
        assert f"child {child.pid}, " in text and "input()" in text
    finally:
        release.set()
        thread.join()
        child.communicate()


def test_a_file_server_that_hangs_does_not_keep_a_process_from_ending(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(progress, "_BRIEF_SECONDS", 0.1)
    path = tmp_path / "stuck-process-0.txt"
    os.mkfifo(path)  # opening it waits for a reader
    with watched(None, tmp_path, lambda: False):
        assert write_stacks(0) is None
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # releases the thread


ENDS_WITH_CHILDREN = """
import os, signal, subprocess, sys
from millrace.distributed.progress import exit_now

children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
children[0].send_signal(signal.SIGSTOP)
os.waitid(os.P_PID, children[0].pid, os.WSTOPPED | os.WNOWAIT)
print(*(child.pid for child in children), flush=True)
exit_now(7)
"""


def test_a_process_that_ends_at_once_leaves_no_suspended_child():
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS_WITH_CHILDREN],
        stdout=subprocess.PIPE,
        start_new_session=True,  # otherwise, the kernel may end it
    )
    assert process.stdout is not None
    suspended, busy = (int(pid) for pid in process.stdout.readline().split())
    assert process.wait(30) == 7
    process.stdout.close()
    os.kill(busy, signal.SIGTERM)  # raises an error if it is gone
    deadline = time.monotonic() + 10
    while _is_alive(suspended) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(suspended)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status


def test_outside_of_training_nobody_is_watched(tmp_path):
    progress.enter_phase("reading samples")
    assert own_activity().phase == ""
    with watched(None, tmp_path, lambda: True):
        assert own_activity().phase == "reading samples"
        assert own_activity().is_excused


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_training_counts_its_calls(tmp_path):
    before = own_activity()
    # Otherwise, the number of updates per call depends on their time.
    plan = mr.Plan(micro_batch_size=2, updates_per_execution=3)
    runner, state, _, _ = make_runner(tmp_path, batches([1.0] * 12), plan=plan)
    runner.run(state)
    after = own_activity()
    assert after.steps - before.steps == 4
    assert after.moves > before.moves


def test_slow_data_is_progress_while_a_long_chunk_is_read():
    plan = mr.Plan(micro_batch_size=2, updates_per_execution=12)
    program = mr.training_program(loss_fn, optax.sgd(0.01), plan)
    moves = []

    def slow_batches():
        for batch in batches([1.0] * 12):
            time.sleep(0.1)
            moves.append(own_activity().moves)
            yield batch

    with mr.Infeed(slow_batches()) as infeed:
        calls = Calls(program, infeed, execution=12, total=12, fixed=True)
        calls.compile(program.init({"w": np.ones(1, np.float32)}))
        calls.next_chunk()
    assert len(set(moves)) > 6
