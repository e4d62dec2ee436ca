import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millrace as mr


def count_up(carry):
    return carry + 1, carry


def test_all_elements_are_kept_in_order_across_loops():
    outfeed = mr.Outfeed()
    carry = mr.repeat(300, count_up, 0, outfeed=outfeed)
    mr.repeat(300, count_up, carry, outfeed=outfeed)
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(600))
    assert outfeed.dequeue() is None


def test_mode_last_keeps_only_the_newest_element():
    outfeed = mr.Outfeed(mode="last")
    mr.repeat(300, count_up, 0, outfeed=outfeed)
    assert outfeed.dequeue() == 299
    assert outfeed.dequeue() == 299


def test_elements_keep_their_structure():
    outfeed = mr.Outfeed()
    mr.repeat(
        5, lambda c: (c, {"a": c, "b": (c * 2, jnp.ones((2, 3)))}), 1.0, outfeed=outfeed
    )
    got = outfeed.dequeue()
    assert got["a"].shape == (5,)
    assert got["b"][1].shape == (5, 2, 3)


@pytest.mark.parametrize("steps", [None, 5])
def test_another_thread_reads_elements_while_the_program_runs(steps):
    def slow(carry):
        x = jnp.full((200, 200), carry * 1e-6)
        products = 60 if jax.default_backend() == "cpu" else 6000  # some milliseconds
        x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ x + 0.1), x)
        return carry + 1, (carry, x.mean())

    outfeed, arrivals = mr.Outfeed(), []
    reader = threading.Thread(
        target=lambda: arrivals.extend((time.perf_counter(), e[0]) for e in outfeed)
    )
    reader.start()
    mr.repeat(60, slow, 0.0, outfeed=outfeed, steps_per_execution=steps)
    ended = time.perf_counter()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert [value for _, value in arrivals] == list(range(60))
    before_the_end = sum(when < ended - 0.02 for when, _ in arrivals)
    assert before_the_end > 20


def test_dequeue_with_wait_returns_everything_when_the_loop_ends():
    outfeed, got = mr.Outfeed(), []
    started = threading.Event()

    def read():
        started.wait()
        got.append(outfeed.dequeue(wait=True))

    reader = threading.Thread(target=read)
    reader.start()
    with outfeed.feeding():
        started.set()
        outfeed.put(jnp.arange(3), 3)
        time.sleep(0.1)
        assert not got
        outfeed.put(jnp.arange(3, 5), 2)
    reader.join(timeout=10)
    np.testing.assert_array_equal(got[0], np.arange(5))


def test_a_slow_reader_slows_the_loop_and_loses_nothing(caplog):
    outfeed = mr.Outfeed(capacity_bytes=4 * 400, patience_seconds=5)
    seen, most = [], 0

    def read():
        nonlocal most
        for element in outfeed:
            most = max(most, sum(block.bytes for block in outfeed._blocks))
            seen.append(int(element[0]))
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    mr.repeat(
        600,
        lambda c: (c + 1, jnp.full(4, c)),
        0,
        outfeed=outfeed,
        steps_per_execution=20,
    )
    reader.join(timeout=30)
    assert seen == list(range(600))
    assert most <= 4 * 400  # a hundred elements of 16 bytes
    assert "the loop waits for its reader" in caplog.text


def test_a_full_outfeed_that_nobody_reads_is_an_error_not_a_hang():
    outfeed = mr.Outfeed(capacity_bytes=100, patience_seconds=0.2)
    with pytest.raises(mr.OutfeedFull, match="nobody reads it"):
        mr.repeat(600, count_up, 0, outfeed=outfeed)


def test_having_been_read_once_does_not_make_a_full_outfeed_wait_forever():
    outfeed = mr.Outfeed(capacity_bytes=100, patience_seconds=0.2)
    mr.repeat(3, count_up, 0, outfeed=outfeed)
    outfeed.dequeue()
    with pytest.raises(mr.OutfeedFull, match="nobody reads it"):
        mr.repeat(600, count_up, 0, outfeed=outfeed)


def test_the_loop_waits_for_a_slow_reader_that_keeps_reading():
    """A block takes it longer than patience_seconds, an element does not."""
    outfeed, seen = mr.Outfeed(capacity_bytes=4 * 8, patience_seconds=0.4), []

    def read():
        for element in outfeed:
            seen.append(int(element))
            time.sleep(0.08)

    reader = threading.Thread(target=read)
    reader.start()
    mr.repeat(24, count_up, 0, outfeed=outfeed, steps_per_execution=8)
    reader.join(timeout=30)
    assert seen == list(range(24))


def test_a_reader_stops_waiting_when_the_loop_fails():
    def failing():
        yield np.zeros(1, np.float32)
        raise OSError("disk")

    outfeed, seen = mr.Outfeed(), []
    reader = threading.Thread(target=lambda: seen.extend(outfeed))
    reader.start()
    with pytest.raises(OSError, match="disk"):
        mr.repeat(9, lambda c, x: (c, x), 0.0, infeed=mr.Infeed(failing()), outfeed=outfeed)
    reader.join(timeout=10)
    assert not reader.is_alive()
    assert len(seen) == 1


def test_a_thread_may_poll_before_the_loop_starts():
    """As the polling thread of Graphcore's example does."""
    outfeed, seen, polled = mr.Outfeed(), [], threading.Event()

    def poll():
        while len(seen) < 5:
            if (values := outfeed.dequeue()) is not None:
                seen.extend(values)
            polled.set()
            time.sleep(1e-3)

    reader = threading.Thread(target=poll, daemon=True)
    reader.start()
    assert polled.wait(10)
    mr.repeat(5, count_up, 0, outfeed=outfeed)
    reader.join(timeout=10)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["all", "last"])
@pytest.mark.parametrize("wait", [False, True])
def test_an_outfeed_whose_loop_has_not_started_is_empty(mode, wait):
    assert mr.Outfeed(mode).dequeue(wait) is None


def test_only_all_elements_can_be_iterated_over():
    with pytest.raises(RuntimeError, match="mode 'all'"):
        next(iter(mr.Outfeed(mode="last")))


@pytest.mark.parametrize("options", [{"mode": "some"}, {"capacity_bytes": 0}])
def test_invalid_options_are_errors(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        mr.Outfeed(**options)


def test_a_reader_stops_waiting_when_the_loop_rejects_its_arguments():
    outfeed = mr.Outfeed()
    reader = threading.Thread(target=lambda: list(outfeed))
    reader.start()
    with pytest.raises(ValueError, match="n must not be negative"):
        mr.repeat(-1, count_up, 0, outfeed=outfeed)
    reader.join(timeout=10)
    assert not reader.is_alive()


def test_a_loop_of_no_steps_leaves_the_outfeed_empty():
    outfeed = mr.Outfeed()
    mr.repeat(0, count_up, 0, outfeed=outfeed)
    assert outfeed.dequeue() is None


def test_two_loops_cannot_fill_one_outfeed_at_once():
    outfeed = mr.Outfeed()
    with outfeed.feeding(), pytest.raises(RuntimeError, match="filled by another loop"):
        mr.repeat(1, count_up, 0, outfeed=outfeed)


def test_the_buffer_counts_the_bytes_it_holds():
    """A loop that runs one step at a time passes stacks that are mostly padding."""

    def slowly():
        for _ in range(12):
            time.sleep(0.02)
            yield np.zeros(1, np.float32)

    outfeed = mr.Outfeed()
    with mr.Infeed(slowly()) as infeed:
        big = lambda c, x: (c, jnp.zeros((256, 256)))  # noqa: E731
        mr.repeat(12, big, 0.0, infeed=infeed, outfeed=outfeed)
    held = sum(
        leaf.nbytes for block in outfeed._blocks for leaf in jax.tree.leaves(block._stack)
    )
    assert held == sum(block.bytes for block in outfeed._blocks)
    assert held <= 2 * 12 * 256 * 256 * 4
