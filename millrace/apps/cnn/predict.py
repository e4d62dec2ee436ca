"""``millrace cnn predict``: the most likely classes of image files."""

import contextlib
import csv
import glob
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from millrace.apps.cnn.classify import ClassifiedFile
from millrace.apps.cnn.config.commands import PredictConfig
from millrace.apps.cnn.predictor import load_trained
from millrace.config import ConfigurationError, writing
from millrace.durable import replacing
from millrace.output import error_line

_ENDINGS = {
    *(".jpg", ".jpeg", ".png", ".webp"),
    *(".bmp", ".gif", ".tif", ".tiff"),
}
"""Endings of the files that are taken from folders."""

_SECONDS_BETWEEN_LINES = 0.5


class Prediction(NamedTuple):
    """The most likely classes of an image with their probabilities, best first."""

    image: Path
    classes: list[tuple[str, float]]


def predict(config: PredictConfig) -> int:
    """Print or write predictions; return 1 if an image could not be read."""
    paths = find_images(config.images)
    trained = load_trained(config.run, config.which)
    unreadable: list[ClassifiedFile] = []
    files: Iterable[ClassifiedFile] = trained.classify_files(paths, config.batch_size)
    if config.output is not None and sys.stderr.isatty():
        files = _show_progress(files, len(paths))
    found = _select_top(_drop_unreadable(files, unreadable), trained.classes, config.top)
    with _open_output(config.output) as file:
        if config.resolved_format == "json":
            _write_json(found, file)
        elif config.resolved_format == "csv":
            _write_csv(found, file)
        else:
            _write_table(found, file, paths, trained.classes)
    num_read = len(paths) - len(unreadable)
    if config.output is not None:
        print(f"{num_read:,} images: {config.output}")
    if unreadable:
        error_line(f"{len(unreadable):,} of {len(paths):,} images could not be read.")
    return 1 if unreadable else 0


def find_images(given: Sequence[str]) -> list[Path]:
    """Return the image files that paths, folders and patterns stand for, each once."""
    return list(dict.fromkeys(path for text in given for path in _expand(text)))


def _expand(text: str) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if _is_image(file, path))
        if not found:
            endings = ", ".join(sorted(_ENDINGS))
            raise ConfigurationError(f"The folder {path} has no images ({endings}).")
        return found
    if path.exists():
        return [path]
    matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []
    if not matches:
        what = "match" if glob.has_magic(text) else "file or folder"
        raise ConfigurationError(f"IMAGES: there is no {what} {text}.")
    return [file for match in matches for file in _expand(match)]


def _is_image(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in _ENDINGS and not is_hidden and file.is_file()


def _show_progress(files: Iterable[ClassifiedFile], total: int) -> Iterator[ClassifiedFile]:
    """Pass files on, and show in the terminal how many there were so far."""
    shown = time.monotonic()
    for done, file in enumerate(files, 1):
        yield file
        if time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            print(f"\r{done:,} of {total:,} images", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr, flush=True)


def _drop_unreadable(
    files: Iterable[ClassifiedFile], unreadable: list[ClassifiedFile]
) -> Iterator[ClassifiedFile]:
    """Pass on what could be read; name the rest at once and collect it."""
    for file in files:
        if file.error is None:
            yield file
        else:
            unreadable.append(file)
            error_line(file.error)


def _select_top(
    files: Iterable[ClassifiedFile], classes: Sequence[str], top: int
) -> Iterator[Prediction]:
    for path, probabilities, _ in files:
        assert probabilities is not None, "unreadable files have been dropped"
        best = probabilities.argsort(kind="stable")[::-1][:top]
        chosen = [(classes[int(n)], float(probabilities[n])) for n in best]
        yield Prediction(path, chosen)


@contextlib.contextmanager
def _open_output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, newline="") as file:
            yield file


def _write_table(
    found: Iterable[Prediction], file: IO[str], paths: Sequence[Path], classes: list[str]
) -> None:
    """Write a line per class; the image is named in the first one of each."""
    first = max(len("image"), *(len(str(path)) for path in paths))
    second = max(len("class"), *map(len, classes))
    print(f"{'image':<{first}}  {'class':<{second}}  probability", file=file)
    for image, best in found:
        label = str(image)
        for name, probability in best:
            print(
                f"{label:<{first}}  {name:<{second}}  {probability:11.4f}",
                file=file,
                flush=file is sys.stdout,
            )
            label = ""


def _write_csv(found: Iterable[Prediction], file: IO[str]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for image, best in found:
        for rank, (name, probability) in enumerate(best, 1):
            writer.writerow([image, rank, name, f"{probability:.6f}"])


def _write_json(found: Iterable[Prediction], file: IO[str]) -> None:
    entries = [
        {
            "image": str(image),
            "classes": [{"class": name, "probability": p} for name, p in best],
        }
        for image, best in found
    ]
    print(json.dumps(entries, indent=2, ensure_ascii=False), file=file)
