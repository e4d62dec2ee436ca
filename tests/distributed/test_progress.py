"""Who is behind the others, and for how long."""

import pytest
from small_runner import batches, make_runner

from millrace.distributed import progress
from millrace.distributed.progress import Progress


def heard(*steps: int, at: float = 0.0) -> Progress:
    found = Progress(len(steps), at)
    for rank, count in enumerate(steps):
        found.hear(rank, count, at)
    return found


def test_who_has_staged_fewer_chunks_for_too_long_is_stuck():
    found = heard(5, 4, 5)
    assert found.newly_stuck(119.0) is None
    assert found.newly_stuck(121.0) == (1, 121.0)


def test_processes_that_all_wait_for_their_devices_are_not_stuck():
    assert heard(5, 5, 5).newly_stuck(1e6) is None


def test_a_stuck_process_is_named_again_only_after_a_step():
    found = heard(5, 4)
    assert found.newly_stuck(200.0) is not None
    assert found.newly_stuck(300.0) is None
    found.hear(1, 5, 301.0)
    found.hear(0, 7, 301.0)
    assert found.newly_stuck(302.0) is None
    assert found.newly_stuck(301.0 + 3 * 301 + 1) is not None


def test_where_steps_take_long_it_takes_longer_to_be_stuck():
    found = heard(0, 0)
    for rank in range(2):
        found.hear(rank, 1, 100.0)
    found.hear(0, 2, 101.0)
    assert found.newly_stuck(100.0 + 299) is None
    assert found.newly_stuck(100.0 + 301) == (1, 301.0)


def test_nobody_is_late_because_this_process_stood_still():
    found = heard(5, 4)
    found.forgive(500.0)
    assert found.newly_stuck(510.0) is None


@pytest.mark.parametrize("updates", [12])
def test_training_counts_its_calls(tmp_path, updates):
    before = progress.steps_counted()
    runner, state, _, _ = make_runner(tmp_path, batches([1.0] * updates), updates=updates)
    runner.run(state)
    assert progress.steps_counted() - before == 4  # logs=4: an execution before each
