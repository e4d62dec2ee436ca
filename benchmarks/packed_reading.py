"""CPU time to read and decode an image, as files and as ``millrace data pack`` stores it.

The arguments are a folder of images and what ``data pack`` made of it::

    millrace data pack photos photos-256 --short-side 256
    millrace data pack photos photos-raw --raw
    python benchmarks/packed_reading.py photos photos-256 photos-raw

Every training image is read and decoded with the same random crop to 224 pixels, in one
thread; rounds alternate between the folders. What a loader does for whole batches is not
included, nor a disk: the files are in memory after the first round. The figures are CPU
time, so other work on the machine changes them little.

Target: an image of the last folder takes at most half of the time of an original.
"""

import functools
import statistics
import time

import numpy as np
from harness import Result, build_parser, format_spread, interleave, paired_ratio, publish

from millrace.data.decoding import NUM_DRAWS, Crop, decode_into, decoder_name
from millrace.data.image_source import ImageSource
from millrace.data.imagenet import load_images


def measure(images: ImageSource, crop: Crop) -> float:
    """Return the CPU time per image, the median over all images, in seconds."""
    out = np.empty((crop.size, crop.size, 3), np.uint8)
    draws = np.random.default_rng(0).random((len(images), NUM_DRAWS), np.float32).tolist()
    seconds = []
    for index, numbers in enumerate(draws):
        started = time.thread_time()
        content, _ = images.reader(images.locate(index))
        decode_into(out, content, crop, numbers)
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds)


def main() -> None:
    """Measure the folders in turn and publish the ratio of the last one."""
    parser = build_parser(__doc__, rounds=5)
    parser.add_argument("paths", nargs="+", help="the folder of images, and packed ones")
    given = parser.parse_args()
    crop = Crop()
    measured = interleave(
        {
            path: functools.partial(measure, load_images(path, crop).training, crop)
            for path in given.paths
        },
        given.rounds,
    )
    original = measured[given.paths[0]]
    rows = [
        {
            "dataset": path,
            "ms per image": format_spread(seconds, 1e3, 3),
            "speed": f"{paired_ratio(original, seconds):.2f}",
        }
        for path, seconds in measured.items()
    ]
    publish(
        Result(
            name="image_packing",
            table=rows,
            ratio_name=f"speed of {given.paths[-1]} / {given.paths[0]}",
            ratio=paired_ratio(original, measured[given.paths[-1]]),
            target=2.0,
            explanation=f"Decoded by {decoder_name()}. Medians over images, then over "
            f"{given.rounds} alternating rounds, with the lowest and the highest.",
            numbers={"seconds_per_image": measured},
        ),
        given,
    )


if __name__ == "__main__":
    main()
