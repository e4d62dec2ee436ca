"""From an entry to the work it stands for, or to why it cannot be done here."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from millrace.bench.spec import Entry
from millrace.bench.workload import Workload
from millrace.config import ConfigurationError, parse


class NotHere(Exception):
    """An entry cannot run on this machine; the message says why."""


def configuration(entry: Entry) -> Any:
    """Return the configuration that an entry's command stands for."""
    config_type, named = _config_type(entry.application)
    try:
        program = f"millrace {entry.application}"
        config, _ = parse(config_type, entry.words, program=program, named_configs=named)
    except ConfigurationError as error:
        raise ConfigurationError(f"{entry.place}: {error}") from error
    if entry.application == "cnn validate" and len(config.batch_size) != 1:
        raise ConfigurationError(
            f"{entry.place}: give one batch size in the command; batch_sizes makes an "
            "entry of each."
        )
    return config


def _config_type(application: str) -> tuple[Any, Path | None]:
    """Return what a command can be told, and where its named configurations are."""
    if application == "cnn train":
        from millrace.apps.cnn.config import CnnConfig as config_type
    elif application == "cnn validate":
        from millrace.apps.cnn.config.commands import ValidateConfig

        return ValidateConfig, None
    elif application == "autoencoder train":
        from millrace.apps.autoencoder.config import AutoencoderConfig as config_type
    elif application == "autoencoder sweep":
        from millrace.apps.autoencoder.config.commands import SweepConfig

        return SweepConfig, None
    else:
        from millrace.apps.vcd.config import VcdConfig as config_type
    folder = resources.files(f"millrace.apps.{application.split()[0]}")
    return config_type, Path(str(folder / "runs.yml"))


def build_workload(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    """Return an entry's work, not yet compiled."""
    platform = "cpu" if devices[0].platform == "cpu" else "gpu"
    if entry.needs not in ("", platform):
        raise NotHere(f"it is for a {entry.needs.upper()}")
    makers: dict[str, Callable[[Entry, Any, list[Any]], Workload]] = {
        "cnn train": _cnn_train,
        "cnn validate": _cnn_validate,
        "autoencoder train": _autoencoder,
        "autoencoder sweep": _sweep,
        "vcd train": _vcd,
    }
    from millrace.data.catalog import DatasetNotFound

    try:
        return makers[entry.application](entry, config, devices)
    except (DatasetNotFound, FileNotFoundError) as error:
        raise NotHere(f"no data: {' '.join(str(error).split())}") from error


def _enough(needed: int, devices: list[Any]) -> None:
    if needed > len(devices):
        raise NotHere(f"it needs {needed} devices, and there are {len(devices)}")


def _cnn_train(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    from millrace.apps.cnn.evaluate import devices_per_replica
    from millrace.bench.cnn import cnn_training

    per_replica = devices_per_replica(config.plan)
    _enough(config.plan.num_replicas * per_replica, devices)
    return cnn_training(config)


def _cnn_validate(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    from millrace.bench.cnn import Validation

    _enough(config.num_replicas, devices)
    return Validation(config)


def _autoencoder(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    from millrace.bench.autoencoder import autoencoder_training

    _enough(1 + max(config.device_indices), devices)
    return autoencoder_training(config, devices)


def _sweep(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    from millrace.bench.autoencoder import autoencoder_sweep

    return autoencoder_sweep(config, devices)


def _vcd(entry: Entry, config: Any, devices: list[Any]) -> Workload:
    from millrace.bench.vcd import VcdTraining

    _enough(config.plan.num_replicas, devices)
    return VcdTraining(config, random_data=entry.random_data)


def bytes_of(command: str) -> float:
    """Count what products and convolutions of a unit of a command read and write.

    Nothing is compiled or run. What is counted is what JAX's default backend would be
    given: a CPU is given other convolutions than a GPU.
    """
    import jax

    entry = Entry(name="command", command=command)
    work = build_workload(entry, configuration(entry), jax.local_devices())
    try:
        return work.traced().num_bytes
    finally:
        work.stop()
