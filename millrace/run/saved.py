"""Find a saved run and its checkpoints from a path. Imports nothing heavy."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from millrace.checkpoint.best import BestMetric, read_best_metric
from millrace.checkpoint.find import checkpoint_name, checkpoints_in, is_checkpoint
from millrace.config import (
    ConfigurationError,
    build,
    flat_options,
    load_yaml,
    open_run,
    option_name,
)
from millrace.config.files import exists
from millrace.numbers import format_number
from millrace.report.record import as_number, read_events
from millrace.run.options import Which
from millrace.storage.address import display

T = TypeVar("T")

_CONFIG = "config.yml"


class ScoredCheckpoint(NamedTuple):
    """A checkpoint with what is known about it before its weights are read."""

    path: Path
    manifest: dict[str, Any]
    scores: dict[str, Any]
    """Metrics of its own weights; empty if they were not validated."""

    @property
    def update(self) -> int:
        """The number of updates that its weights were trained for."""
        return self.manifest["update"]

    @property
    def epoch(self) -> float | None:
        """The number of passes over the data, if it was saved by a training run."""
        return self.manifest.get("epoch")


class ChosenCheckpoint(NamedTuple):
    """The checkpoint of a run that was asked for."""

    path: Path
    update: int
    epoch: float | None
    metrics: dict[str, float]
    """Metrics when it was saved, and those of its own weights."""
    title: str
    """What it is, such as "the best checkpoint"."""
    score: tuple[str, float] | None
    """Name and value of the metric that the best checkpoint is chosen by."""

    def describe(self) -> str:
        """Return one line about it."""
        facts = [f"update {self.update:,}"]
        if self.epoch is not None:
            facts.append(f"epoch {self.epoch:g}")
        if self.score is not None:
            name, value = self.score
            facts.append(f"{name.replace('_', ' ')} {format_number(value)}")
        return f"using {self.title}: {', '.join(facts)}"


def announce(line: str) -> None:
    """Print a line about a checkpoint on standard error."""
    print(line, file=sys.stderr)


class SavedRun(NamedTuple):
    """A run on disk."""

    path: Path
    """The path that it was found from."""
    directory: Path | None
    """The run directory; None if there are only checkpoints."""
    options: dict[str, Any]
    """The options in its ``config.yml``, including ``command``."""
    checkpoints: list[Path]
    """All checkpoints, oldest first, or the one that the path names."""

    def check_command(self, command: str) -> None:
        """Raise an error unless this is a run of `command`, such as ``cnn-train``."""
        if (actual := self.options.get("command")) != command:
            raise ConfigurationError(
                f"{display(self.directory or self.path)} is a run of {actual}, not of "
                f"{command}."
            )

    def build_config(self, config_type: type[T], *, without: Iterable[str] = ()) -> T:
        """Return the configuration of the run, without options about one start of it.

        Args:
            config_type: The configuration class of its command.
            without: More options to leave out.
        """
        known = flat_options(config_type)
        starting = {n for n, option in known.items() if option.metadata.get("transient")}
        skipped = {"command", *starting, *without}
        named = {option_name(config_type, key): v for key, v in self.options.items()}
        kept = {name: v for name, v in named.items() if name not in skipped}
        return build(config_type, kept, expand=False)

    def choose(
        self, which: Which = "best", *, best_by: BestMetric | None = None
    ) -> ChosenCheckpoint:
        """Return a checkpoint; one that the path of the run names is always taken.

        Args:
            which: The best checkpoint, the last, or that after this number of updates. In a
                run without validation, the last one is the best.
            best_by: The metric of runs that have not recorded theirs.
        """
        if is_checkpoint(self.path):
            self._check_update(which)
            return self._choose(self.path, "the checkpoint", best_by)
        if isinstance(which, int):
            return self._choose(self._find_update(which), "the checkpoint", best_by)
        if which not in ("best", "last", "newest"):
            raise ConfigurationError(
                f"which must be best, last or the number of an update, got {which!r}."
            )
        if which == "best":
            scored = read_scores(self.checkpoints, self._read_events())
            best_by = find_best_metric(scored) or best_by
            best = choose_best(scored, best_by)
            if best is not None:
                return _build_chosen(best, "the best checkpoint", best_by)
            title = "the last checkpoint, because none was validated"
            return self._choose(self.checkpoints[-1], title, best_by)
        return self._choose(self.checkpoints[-1], "the last checkpoint", best_by)

    def _choose(
        self, path: Path, title: str, best_by: BestMetric | None
    ) -> ChosenCheckpoint:
        from millrace.checkpoint.manifest import read_manifest

        manifest = read_manifest(path)  # raises an error about a damaged checkpoint
        (scored,) = read_scores([path], self._read_events())
        return _build_chosen(scored, title, read_best_metric(manifest) or best_by)

    def _read_events(self) -> list[dict[str, Any]]:
        return [] if self.directory is None else read_events(self.directory)

    def _check_update(self, which: Which) -> None:
        if isinstance(which, int) and self.path.name != checkpoint_name(which):
            raise ConfigurationError(
                f"{display(self.path)} is one checkpoint, not that after update {which}. "
                "Give the run directory."
            )

    def _find_update(self, update: int) -> Path:
        for path in self.checkpoints:
            if path.name == checkpoint_name(update):
                return path
        kept = [int(path.name.removeprefix("update-")) for path in self.checkpoints]
        raise ConfigurationError(
            f"{display(self.path)} has no checkpoint after update {update}, only after "
            f"{', '.join(map(str, kept))}."
        )


def _build_chosen(
    scored: ScoredCheckpoint, title: str, best_by: BestMetric | None
) -> ChosenCheckpoint:
    value = None if best_by is None else best_by.get(scored.scores)
    score = None if best_by is None or value is None else (best_by.name, value)
    metrics = (scored.manifest.get("metrics") or {}) | scored.scores
    metrics = {name: as_number(metric) for name, metric in metrics.items()}
    return ChosenCheckpoint(scored.path, scored.update, scored.epoch, metrics, title, score)


def read_scores(
    checkpoints: Sequence[Path], events: Iterable[Mapping[str, Any]]
) -> list[ScoredCheckpoint]:
    """Return what is known about checkpoints; damaged ones are left out.

    Args:
        checkpoints: Their paths.
        events: Log events of the run, which has those of validation after training.
    """
    from millrace.checkpoint.manifest import CheckpointError, read_manifest

    logged: dict[int, dict[str, Any]] = {}
    for event in events:
        values = {n: v for n, v in event.items() if n.startswith("validation_")}
        logged.setdefault(event["update"], {}).update(values)
    found = []
    for path in checkpoints:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        update = manifest["update"]
        # An average of checkpoints has the update of the last one, but not its scores.
        own = logged.get(update, {}) if path.name == checkpoint_name(update) else {}
        scores = own | (manifest.get("scores") or {})
        found.append(ScoredCheckpoint(path, manifest, scores))
    return found


def find_best_metric(scored: Iterable[ScoredCheckpoint]) -> BestMetric | None:
    """Return the metric that a run has recorded with its checkpoints, if any."""
    recorded = [read_best_metric(each.manifest) for each in scored]
    return next((metric for metric in reversed(recorded) if metric is not None), None)


def choose_best(
    scored: Iterable[ScoredCheckpoint], best_by: BestMetric | None
) -> ScoredCheckpoint | None:
    """Return the best of several checkpoints; None if none was validated."""
    if best_by is None:
        return None
    return best_by.choose((each, each.scores) for each in scored)


def find_best_result(
    best_by: BestMetric, folder: Path, events: Sequence[Mapping[str, Any]], home: Path
) -> dict[str, Any] | None:
    """Return the best validation result of a run, as ``summary.json`` has it, if any.

    If no checkpoint has these weights, the best one that there is comes with it.

    Args:
        best_by: What is best.
        folder: The checkpoints.
        events: The log events.
        home: The run directory.
    """
    best_event = best_by.choose((event, event) for event in events)
    best_saved = choose_best(read_scores(checkpoints_in(folder), events), best_by)
    saved = event = None
    if best_event is not None:
        place = {name: best_event.get(name) for name in ("update", "epoch")}
        event = {"value": best_by.get(best_event)} | place | {"checkpoint": None}
    if best_saved is not None:
        saved = {
            "value": best_by.get(best_saved.scores),
            "update": best_saved.update,
            "epoch": best_saved.epoch,
            "checkpoint": _relative(best_saved.path, home),
        }
    # Of equal results, the one with a checkpoint.
    found = [(each, {best_by.name: each["value"]}) for each in (saved, event) if each]
    if (best := best_by.choose(found)) is None:
        return None
    other = {} if saved in (None, best) else {"best_checkpoint": saved}
    return {"metric": best_by.name, "mode": best_by.mode} | best | other


def _relative(path: Path, home: Path) -> str:
    """Return a path inside the run directory, so that the run can be moved."""
    return str(path.relative_to(home) if path.is_relative_to(home) else path.absolute())


def find_run(
    path: Path | str, *, command: str | None = None, needs_checkpoints: bool = True
) -> SavedRun:
    """Find the run that a path belongs to.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint, on this
            machine or in object storage.
        command: The command that writes such runs, named if nothing is found.
        needs_checkpoints: Whether a run without a checkpoint is an error.
    """
    path = open_run(path)
    # From a checkpoint, the run directory is two levels up.
    folders = (path, *path.absolute().parents[:2])
    directory = next((folder for folder in folders if (folder / _CONFIG).is_file()), None)
    options = load_yaml(directory / _CONFIG) if directory is not None else {}
    checkpoints = _find_checkpoints(path, options)
    if needs_checkpoints and not checkpoints:
        kind = f"a run of `millrace {command}`" if command else "a run"
        missing = f"There are no checkpoints in {display(path)}"
        if not exists(path):
            missing = f"There is no {display(path)}"
        raise ConfigurationError(
            f"{missing}. Give the directory of {kind} with checkpoints, or one of those."
        )
    return SavedRun(path, directory, options, checkpoints)


def _find_checkpoints(path: Path, options: dict[str, Any]) -> list[Path]:
    if is_checkpoint(path):
        return [path]
    folders = [path, path / "checkpoints"]
    if configured := options.get("checkpoint_dir"):
        folders.append(Path(configured))
    return next((paths for folder in folders if (paths := checkpoints_in(folder))), [])


def read_weights(checkpoint: Path, like: Any = None) -> tuple[Any, Any]:
    """Return the weights and the model state in a checkpoint, whatever the model.

    Args:
        checkpoint: Its path.
        like: Weights of the same structure, or a training state, if they have containers
            that a checkpoint cannot rebuild.
    """
    from millrace.checkpoint.weights import restore_weights

    return restore_weights(checkpoint, like)
