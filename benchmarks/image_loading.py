"""Images per second and per core-second of our loader and of others.

All read the same class folders with random resized crops to 224 pixels and flips, in
batches of 256, with the same number of worker processes (threads for SPDL). Each
measurement is a new process; rounds alternate between the loaders. Core-seconds are those
of all processes of a loader after its start.

Target: 1.3 times the images per core-second of a PyTorch DataLoader. It uses torchvision
where that is installed, and otherwise the same steps in Pillow. With --also, grain and SPDL
are measured too; they decode and crop with our function, so that only the loaders differ.
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
_WARMUP = 4
_BATCHES_PER_WORKER = 40


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
        prefetch_factor=4,
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
    options = grain.multiprocessing.MultiprocessingOptions(workers, 4)
    return iter(batches.to_iter_dataset().mp_prefetch(options)), f"grain: {decoder_name()}"


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
        .add_sink(4)
        .build(num_threads=workers + 1)
    )
    pipeline.start()
    return iter(pipeline.get_iterator()), f"SPDL: {decoder_name()}"


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


LOADERS = {"ours": open_ours, "torch": open_torch, "grain": open_grain, "spdl": open_spdl}


def measure_here(which: str, path: str, workers: int, batches: int) -> None:
    """Measure one loader; print the figures as JSON."""
    stream, decoder = LOADERS[which](path, workers)
    for _ in range(_WARMUP):
        next(stream)
    cpu, started = cpu_seconds(), time.perf_counter()
    for _ in range(batches):
        next(stream)
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    images = batches * _BATCH
    figures = {"per_second": images / wall, "per_core_second": images / cpu}
    print(json.dumps({**figures, "decoder": decoder}), flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # no loader needs to end in order


def measure(python: str, *arguments: Any) -> dict[str, Any]:
    """Measure in a new process."""
    command = [python, __file__, "--here", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure all in turn and publish the ratio."""
    from harness import Result, add_sizes, build_parser, publish

    parser = build_parser(__doc__, rounds=3)
    parser.add_argument("path", help="folder with train/CLASS/*.jpg")
    parser.add_argument("--torch-python", default=sys.executable, help="has PyTorch")
    parser.add_argument("--also", nargs="*", default=[], choices=["grain", "spdl"])
    add_sizes(parser, {"num_workers": 2, "num_batches": 80})
    given = parser.parse_args()
    # Some loaders have several batches per worker ready when the clock starts.
    given.num_batches = max(given.num_batches, _BATCHES_PER_WORKER * given.num_workers)
    pythons = {"ours": sys.executable, "torch": given.torch_python}
    pythons |= dict.fromkeys(given.also, sys.executable)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for _ in range(given.rounds):
        for name, python in pythons.items():
            figures = measure(
                python, name, given.path, given.num_workers, given.num_batches
            )
            found[name].append(figures)
            print(name, figures, file=sys.stderr)
    medians = {
        name: {
            key: statistics.median(figures[key] for figures in rounds)
            for key in ("per_second", "per_core_second")
        }
        for name, rounds in found.items()
    }
    table = [
        {
            "loader": f"{name}: {found[name][0]['decoder']}",
            "images/s": f"{medians[name]['per_second']:,.0f}",
            "images per core-second": f"{medians[name]['per_core_second']:,.0f}",
        }
        for name in pythons
    ]
    pairs = zip(found["ours"], found["torch"], strict=True)
    ratio = statistics.median(a["per_core_second"] / b["per_core_second"] for a, b in pairs)
    publish(
        Result(
            name="image_loading",
            table=table,
            ratio_name="images per core-second, ours / DataLoader",
            ratio=ratio,
            target=1.3,
            explanation=f"{given.num_workers} workers, batches of {_BATCH}, "
            f"{given.num_batches} batches after {_WARMUP} for warmup, medians of "
            f"{given.rounds} alternating rounds. Decoding takes four fifths of the time.",
            numbers={"medians": medians, "rounds": found},
        ),
        given,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        _, _, which, path, workers, batches = sys.argv
        measure_here(which, path, int(workers), int(batches))
    else:
        main()
