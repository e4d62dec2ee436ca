"""Images per second and per core-second of our loader and of others.

All read the same class folders with random resized crops to 224 pixels and flips, in
batches of 256, with the same number of worker processes (threads for SPDL). Each
measurement is a new process; rounds alternate between the loaders. Core-seconds are those
of all processes of a loader.

Workers have batches ready when the clock starts, which were decoded before. So as many
batches as all buffers hold are taken first; after that, the consumer always waits, and
the buffers are as empty at the end of a measurement as at its start. Both halves of it are
printed: they agree unless something was ready or the machine was busy with other work.
grain and SPDL cannot decode more per core-second than the same function in a loop, which
is measured too.

Targets: 1.3 times the images per core-second of a PyTorch DataLoader, which uses
torchvision where that is installed, and otherwise the same steps in Pillow; and, with the
same decoder, as many images per second as grain or SPDL, whichever is faster. These decode
and crop with our function, so that only the loaders differ.
"""

import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BATCH = 256
_BUFFERED = 4
"""Batches that a worker of grain or PyTorch, or all of SPDL, may have ready."""
_WARMUP_PER_WORKER = 2 * _BUFFERED
_BATCHES_PER_WORKER = 5 * _BUFFERED
_LOOP_IMAGES = 1000
_SAME_DECODER = ("grain", "spdl")
_RATIOS = {"images/s": "per_second", "per core-second": "per_core_second"}


def open_ours(path: str, workers: int) -> tuple[Iterator[Any], str]:
    """Return endless batches of our loader, and what decodes them."""
    from millrace.data.decoding import Crop, decoder_name
    from millrace.data.imagenet import load_images

    images = load_images(path, Crop(), num_workers=workers, needs_validation=False)
    return iter(images.training.stream(_BATCH)), decoder_name()


def open_torch(path: str, workers: int) -> tuple[Iterator[Any], str]:
    """Return endless batches of a DataLoader, and what decodes them."""
    import torch.utils.data

    try:
        from torchvision import datasets
        from torchvision import transforms as steps
    except ImportError:
        images, decoder = PillowFolder(path), "Pillow"
    else:
        crop = steps.RandomResizedCrop(224, scale=(0.05, 1.0))
        transform = steps.Compose([crop, steps.RandomHorizontalFlip(), steps.PILToTensor()])
        images, decoder = datasets.ImageFolder(f"{path}/train", transform), "torchvision"
    loader = torch.utils.data.DataLoader(
        images,
        batch_size=_BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        prefetch_factor=_BUFFERED,
        persistent_workers=True,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader)), decoder


def open_grain(path: str, workers: int) -> tuple[Iterator[Any], str]:
    """Return endless batches of grain with our decoder, and what decodes them."""
    import grain
    from absl import flags

    from millrace.data.decoding import decoder_name

    flags.FLAGS.mark_as_parsed()  # grain reads flags

    samples = grain.MapDataset.source(find_files(path)).shuffle(0).repeat()
    batches = samples.random_map(decode_randomly, seed=0).batch(_BATCH, drop_remainder=True)
    # In each of its processes, more threads would contend for the interpreter lock.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    options = grain.multiprocessing.MultiprocessingOptions(workers, _BUFFERED)
    return iter(batches.to_iter_dataset(reading).mp_prefetch(options)), decoder_name()


def open_spdl(path: str, workers: int) -> tuple[Iterator[Any], str]:
    """Return endless batches of SPDL with our decoder, and what decodes them."""
    import random

    import numpy as np
    from spdl.pipeline import PipelineBuilder

    from millrace.data.decoding import decoder_name

    files = find_files(path)

    def stack(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
        images, labels = zip(*samples, strict=True)
        return np.stack(images), np.array(labels)

    numbers = np.random.default_rng(0)
    pipeline = (
        PipelineBuilder()
        .add_source(random.choice(files) for _ in itertools.count())
        .pipe(lambda file: decode_randomly(file, numbers), concurrency=workers)
        .aggregate(_BATCH, drop_last=True)
        .pipe(stack)
        .add_sink(_BUFFERED)
        .build(num_threads=workers + 1)
    )
    pipeline.start()
    return iter(pipeline.get_iterator()), decoder_name()


def find_files(path: str) -> list[tuple[str, int]]:
    """Return the images and their labels."""
    folders = sorted(Path(path, "train").iterdir())
    return [(str(f), n) for n, folder in enumerate(folders) for f in folder.iterdir()]


def decode_randomly(sample: tuple[str, int], numbers: Any) -> tuple[Any, int]:
    """Read, decode, crop and flip an image with our function."""
    import numpy as np

    from millrace.data.decoding import NUM_DRAWS, Crop, decode_into

    out = np.empty((224, 224, 3), np.uint8)
    draws = numbers.random(NUM_DRAWS, np.float32).tolist()
    decode_into(out, Path(sample[0]).read_bytes(), Crop(), draws)
    return out, sample[1]


class PillowFolder:
    """What torchvision's ImageFolder, RandomResizedCrop and flip do, in Pillow."""

    def __init__(self, path: str) -> None:
        self._files = sorted(Path(path, "train").glob("*/*"))
        names = sorted({file.parent.name for file in self._files})
        self._label = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import math
        import random

        import numpy as np
        import torch
        from PIL import Image

        file = self._files[index]
        with open(file, "rb") as content:
            image = Image.open(content).convert("RGB")
        width, height = image.size
        box = (0, 0, width, height)
        for _ in range(10):
            area = random.uniform(0.05, 1.0) * width * height
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                x, y = random.randint(0, width - w), random.randint(0, height - h)
                box = (x, y, x + w, y + h)
                break
        image = image.crop(box).resize((224, 224), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels, self._label[file.parent.name]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all processes below it."""
    parents, seconds = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = int(fields[11]) + int(fields[12])
    total, below = 0, [os.getpid()]
    while below:
        process = below.pop()
        total += seconds.get(process, 0)
        below += [child for child, parent in parents.items() if parent == process]
    return total / os.sysconf("SC_CLK_TCK")


Figures = list[dict[str, Any]]
"""What was measured of one loader, by round."""
LOADERS = {"ours": open_ours, "torch": open_torch, "grain": open_grain, "spdl": open_spdl}


def measure_here(which: str, path: str, workers: int, batches: int) -> None:
    """Measure one loader; print the figures as JSON."""
    stream, decoder = LOADERS[which](path, workers)
    for _ in range(_WARMUP_PER_WORKER * workers):
        next(stream)
    cpu, times = cpu_seconds(), [time.perf_counter()]
    for half in (batches // 2, batches - batches // 2):
        for _ in range(half):
            next(stream)
        times.append(time.perf_counter())
    cpu = cpu_seconds() - cpu
    first, second = (batches / 2 * _BATCH / (b - a) for a, b in itertools.pairwise(times))
    figures = {
        "per_second": batches * _BATCH / (times[-1] - times[0]),
        "per_core_second": batches * _BATCH / cpu,
        "halves": [first, second],
        "decoder": decoder,
    }
    print(json.dumps(figures), flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # no loader needs to end in order


def measure_decoder_here(path: str) -> None:
    """Decode in a loop; print the figures as JSON."""
    import numpy as np

    from millrace.data.decoding import decoder_name

    files, numbers = find_files(path), np.random.default_rng(0)
    chosen = [files[i] for i in numbers.integers(0, len(files), _LOOP_IMAGES)]
    decode_randomly(chosen[0], numbers)
    started, cpu = time.perf_counter(), time.process_time()
    for file in chosen:
        decode_randomly(file, numbers)
    rate = _LOOP_IMAGES / (time.perf_counter() - started)
    per_core = _LOOP_IMAGES / (time.process_time() - cpu)
    figures = {"per_second": rate, "per_core_second": per_core, "halves": [rate, rate]}
    print(json.dumps({**figures, "decoder": decoder_name()}), flush=True)


def measure(python: str, *arguments: Any) -> dict[str, Any]:
    """Measure in a new process."""
    command = [python, __file__, "--here", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def median_ratio(ours: Figures, others: Figures, key: str) -> float:
    """Return the median over rounds of a ratio, which cancels drift of the machine."""
    pairs = zip(ours, others, strict=True)
    return statistics.median(one[key] / other[key] for one, other in pairs)


def build_table(found: dict[str, Figures]) -> list[dict[str, str]]:
    """Return one row per loader."""
    rows = []
    for name, rounds in found.items():
        per_second, per_core, *halves = (
            statistics.median(values)
            for values in zip(
                *((r["per_second"], r["per_core_second"], *r["halves"]) for r in rounds),
                strict=True,
            )
        )
        rows.append(
            {
                "loader": f"{name}: {rounds[0]['decoder']}",
                "images/s": f"{per_second:,.0f}",
                "first half": f"{halves[0]:,.0f}",
                "second half": f"{halves[1]:,.0f}",
                "images per core-second": f"{per_core:,.0f}",
            }
        )
        for label, key in _RATIOS.items():
            ratio = median_ratio(found["ours"], rounds, key)
            rows[-1][f"ours / this, {label}"] = f"{ratio:.2f}"
    return rows


def judge(found: dict[str, Figures]) -> tuple[str, float, float]:
    """Return the name of the ratio to report, the ratio, and its target."""
    ours = found["ours"]
    if "torch" in found:
        ratio = median_ratio(ours, found["torch"], "per_core_second")
        return "images per core-second, ours / DataLoader", ratio, 1.3
    same = [found[name] for name in _SAME_DECODER if name in found]
    ratio = min(median_ratio(ours, rounds, "per_second") for rounds in same)
    return "images per second, ours / the fastest with the same decoder", ratio, 1.0


def main() -> None:
    """Measure all in turn and publish the ratio."""
    from harness import Result, add_sizes, build_parser, publish

    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("path", help="folder with train/CLASS/*.jpg")
    parser.add_argument("--torch-python", default=sys.executable, help="has PyTorch")
    parser.add_argument(
        "--with",
        dest="others",
        nargs="+",
        default=["torch"],
        choices=["torch", *_SAME_DECODER],
        help="loaders to compare with (default: torch)",
    )
    add_sizes(parser, {"num_workers": 2, "num_batches": 40})
    given = parser.parse_args()
    given.num_batches = max(given.num_batches, _BATCHES_PER_WORKER * given.num_workers)
    found: dict[str, Figures] = {name: [] for name in ("decoder", "ours", *given.others)}
    for _ in range(given.rounds):
        for name, rounds in found.items():
            python = given.torch_python if name == "torch" else sys.executable
            rounds.append(
                measure(python, name, given.path, given.num_workers, given.num_batches)
            )
            print(name, rounds[-1], file=sys.stderr)
    ratio_name, ratio, target = judge(found)
    publish(
        Result(
            name="image_loading",
            table=build_table(found),
            ratio_name=ratio_name,
            ratio=ratio,
            target=target,
            explanation=f"{given.num_workers} workers, batches of {_BATCH}, "
            f"{given.num_batches} batches after {_WARMUP_PER_WORKER * given.num_workers} "
            f"for warmup, medians of {given.rounds} alternating rounds. Loaders may have "
            f"{_BUFFERED} batches per worker ready. The decoder alone is one process.",
            numbers={"rounds": found},
        ),
        given,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        _, _, which, path, workers, batches = sys.argv
        if which == "decoder":
            measure_decoder_here(path)
        else:
            measure_here(which, path, int(workers), int(batches))
    else:
        main()
