"""Ten steps in one compiled program: an infeed brings data in, an outfeed results out.

The body runs on the device without returning to the host between steps. The carry goes
from step to step; every step also has an output.
"""

import itertools

import numpy as np

import millrace as mr

# Any iterable of NumPy arrays (or tuples and dicts of them) is a dataset. This one repeats
# a pair of constant arrays forever.
ones = np.ones(800, np.float32)
dataset = map(lambda x: (x, x), itertools.repeat(ones))
outfeed = mr.Outfeed()


def body(count, element):
    """Process one element; return the new carry and an output for the outfeed."""
    x1, x2 = element
    return count + 1, {"d1": x1 + x2, "d2": x1 - x2}


def add_up(total, element):
    """Add an element to the carry; the output is the sum so far."""
    x1, x2 = element
    total = total + (x1 + x2).sum()
    return total, total


with mr.Infeed(dataset) as infeed:
    # A fixed number of steps. The carry is returned; outputs go to the outfeed.
    count = mr.repeat(10, body, 0, infeed=infeed, outfeed=outfeed)
    results = outfeed.dequeue()
    print(f"repeat ran {count} steps")
    for name, values in results.items():
        print(f"  {name}: shape {values.shape}, every value {values.mean():g}")

    # The number of steps depends on the data: until the sum passes 20,000.
    total = mr.while_loop(
        lambda total: total < 20_000, add_up, 0.0, infeed=infeed, outfeed=outfeed
    )
    sums = outfeed.dequeue()
    print(f"while_loop ran {len(sums)} steps of 1,600 and stopped at {total:,.0f}")
    print(f"the loops used {infeed.position} elements")

assert count == 10
assert results["d1"].shape == results["d2"].shape == (10, 800)
assert (results["d1"] == 2).all() and (results["d2"] == 0).all()
assert total == sums[-1] == 13 * 1600 and infeed.position == 10 + 13
