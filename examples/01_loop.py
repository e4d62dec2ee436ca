"""Ten steps in one compiled program: data in by an infeed, results out by an outfeed.

The body runs on the device without returning to the host between steps. What lasts from
step to step is the carry; what each step makes is its output.
"""

import itertools

import numpy as np

import millrace as mr

# Any iterable of NumPy arrays (or tuples and dicts of them) is a dataset. This one is a
# constant of 800 ones, mapped to a pair and repeated without end.
ones = np.ones(800, np.float32)
dataset = map(lambda x: (x, x), itertools.repeat(ones))
outfeed = mr.Outfeed()


def body(count, element):
    """Take one element; return the new carry, and an output for the outfeed."""
    x1, x2 = element
    return count + 1, {"d1": x1 + x2, "d2": x1 - x2}


def add_up(total, element):
    """Carry a sum on; the output is the sum so far."""
    x1, x2 = element
    total = total + (x1 + x2).sum()
    return total, total


with mr.Infeed(dataset) as infeed:
    # A known number of steps. Only the carry is returned; it needs no queue.
    count = mr.repeat(10, body, 0, infeed=infeed, outfeed=outfeed)
    results = outfeed.dequeue()
    print(f"repeat made {count} steps")
    for name, values in results.items():
        print(f"  {name}: shape {values.shape}, every value {values.mean():g}")

    # A number of steps that depends on the data: until the sum passes 20,000.
    total = mr.while_loop(
        lambda total: total < 20_000, add_up, 0.0, infeed=infeed, outfeed=outfeed
    )
    sums = outfeed.dequeue()
    print(f"while_loop made {len(sums)} steps of 1,600 and stopped at {total:,.0f}")
    print(f"the infeed gave out {infeed.position} elements")

assert count == 10
assert results["d1"].shape == results["d2"].shape == (10, 800)
assert (results["d1"] == 2).all() and (results["d2"] == 0).all()
assert total == sums[-1] == 13 * 1600 and infeed.position == 10 + 13
