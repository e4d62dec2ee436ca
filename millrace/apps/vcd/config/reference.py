"""Nested JSON configurations of the reference implementation. Imports nothing heavy."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from millrace.config import ConfigurationError, did_you_mean, shown

_NO_LEARNING_RATE = ""
"""The reference writes this where the tuned learning rate is meant."""


def _learning_rate(value: Any) -> Any:
    return None if value == _NO_LEARNING_RATE else value


def _device(value: str) -> str:
    """Return our name of a device such as /device:IPU:0, which means an accelerator."""
    kind = str(value).strip("/").removeprefix("device:").split(":")[0].lower()
    return kind if kind in ("cpu", "gpu", "tpu") else "auto"


def _same(value: Any) -> Any:
    return value


_Convert = Callable[[Any], Any]
_OPTIONS: dict[str, tuple[str, _Convert]] = {
    # Keys in model[0].args. Older files have the second spelling.
    "micro_batch_size": ("micro_batch_size", _same),
    "batch_size": ("micro_batch_size", _same),
    "device": ("device", _device),
    "n_replicas": ("num_replicas", _same),
    "save_checkpoints": ("checkpoints", _same),
    "network.z_dim": ("z_dim", _same),
    "network.encoder.kwargs.n_hidden": ("num_hidden", _same),
    "network.decoder.kwargs.n_hidden": ("num_hidden", _same),
    "testing.micro_batch_size_test": ("test_micro_batch_size", _same),
    "testing.batch_size_te": ("test_micro_batch_size", _same),
    "testing.n_iwae_samples_test": ("num_importance_samples", _same),
    "testing.n_iwae_samples_te": ("num_importance_samples", _same),
    "testing.iwae_samples_test_micro_batch_size": ("importance_group_size", _same),
    "testing.iwae_samples_te_batch_size": ("importance_group_size", _same),
    "testing.mcmc.hmc_step_size_init": ("test_step_size", _same),
    "testing.mcmc.acceptance_target": ("test_acceptance_target", _same),
    "testing.mcmc.n_burn_in_steps": ("num_test_burn_in_steps", _same),
    "testing.mcmc.n_hmc_steps": ("num_test_hmc_steps", _same),
    "testing.mcmc.n_leapfrog_steps": ("num_test_leapfrog_steps", _same),
    "training.base_lr.encoder.mean": ("encoder_mean_learning_rate", _learning_rate),
    "training.base_lr.encoder.std": ("encoder_std_learning_rate", _learning_rate),
    "training.base_lr.decoder": ("decoder_learning_rate", _learning_rate),
    "training.control_variate.decay": ("control_variate_decay", _same),
    "training.control_variate.independent_iterations": ("independent_iterations", _same),
    "training.lr_kwargs.epoch_timescale": ("epoch_timescale", _same),
    "training.mcmc.acceptance_target": ("acceptance_target", _same),
    "training.mcmc.hmc_step_size_init": ("step_size", _same),
    "training.mcmc.n_burn_in_steps": ("num_burn_in_steps", _same),
    "training.mcmc.n_hmc_steps": ("num_hmc_steps", _same),
    "training.mcmc.n_leapfrog_steps": ("num_leapfrog_steps", _same),
    "training.mcmc.step_size_adaption_fn": ("step_size_adaption", _same),
    "training.mcmc.step_size_adaption_rate": ("step_size_adaption_rate", _same),
    "training.n_epoch": ("num_epochs", _same),
    "data.loading.set": ("dataset", _same),
    "data.n_validation": ("num_validation", _same),
}
_EXPERIMENT = {"testing": "testing", "validation": "validation"}
"""Keys in experiment.args."""
_ONLY = {
    "network.encoder.name": "vcd",
    "network.decoder.name": "vcd",
    "training.optimiser_config": "vcd",
    "testing.mcmc.use_train_step_size_init": False,
    "data.loading.shuffle_pre_split": False,
    "data.loading.subtract_train_mean": False,
    "data.formats.np": "np.float32",
    "data.formats.tf": "tf.float32",
}
"""Keys that have one value in all published files; nothing else exists here."""
_UNUSED = {
    # The reference does not read them either.
    *("_evaluate", "data.loading.dynamic_binarise", "data.loading.shuffle_each_epoch"),
    *("data.use_tfp_data", "training.mcmc.hmc_only"),
    # How often it returns to the host and tests: at the end, in all published files.
    *("training.use_infeed", "training.n_infeed_batches"),
    *("training.n_epoch_freq_val", "testing.n_epoch_freq_test"),
    *("testing.n_epoch_freq_te",),
}
_CONTROL = "training.control_variate."


def is_nested(values: Mapping[str, Any]) -> bool:
    """Whether a file has the layout of the reference."""
    return isinstance(values.get("model"), list)


def flatten_reference(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a nested configuration of the reference sets.

    A key that neither implementation knows is an error, as is a value that asks for
    something that does not exist here.
    """
    models = values["model"]
    if set(values) - {"model", "experiment"} or len(models) != 1:
        raise ConfigurationError(
            "A nested configuration has a list of one model, and experiment; got "
            f"{', '.join(values)} with {len(models)} models."
        )
    given = dict(_walk(_args(models[0], "model[0]")))
    options = _control_variate(given)
    for key, value in given.items():
        options |= _convert(key, value)
    if not options.get("num_validation", 1):
        del options["num_validation"]  # 0 unless there is a validation
    return options | _read_experiment(_args(values.get("experiment", {}), "experiment"))


def _args(part: Any, place: str) -> Mapping[str, Any]:
    args = part.get("args", {}) if isinstance(part, Mapping) else None
    if not isinstance(args, Mapping):
        raise ConfigurationError(f"{place} must have a mapping args; got {shown(part)}.")
    return args


def _walk(part: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in part.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _convert(key: str, value: Any) -> dict[str, Any]:
    if key in _OPTIONS:
        name, convert = _OPTIONS[key]
        return {name: convert(value)}
    if key in _ONLY and value != _ONLY[key]:
        raise ConfigurationError(
            f"{key} is {shown(value)}, but only {shown(_ONLY[key])} exists here."
        )
    if key not in _ONLY and key not in _UNUSED:
        raise ConfigurationError(
            f"Unknown key {key[:80]} in model[0].args.{did_you_mean(key, _OPTIONS)}"
        )
    return {}


def _control_variate(given: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of control variate, and take its two switches out of `given`."""
    used = given.pop(f"{_CONTROL}use_control_variate", None)
    is_local = given.pop(f"{_CONTROL}use_local_control_variate", None)
    if used is None and is_local is None:
        return {}
    kind = "global" if is_local is False else "local"
    return {"control_variate": "none" if used is False else kind}


def _read_experiment(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("training", True) is not True:
        raise ConfigurationError(
            "experiment.args.training is off. Test a trained model with vcd evaluate RUN."
        )
    if args.get("checkpoint_path"):
        raise ConfigurationError(
            "experiment.args.checkpoint_path names a TensorFlow checkpoint, which cannot "
            "be read. Continue a run of millrace with --resume RUN."
        )
    known = {*_EXPERIMENT, "training", "checkpoint_path", "data", "_evaluate"}
    for key in args:
        if key not in known:
            raise ConfigurationError(
                f"Unknown key {str(key)[:80]} in experiment.args."
                f"{did_you_mean(str(key), known)}"
            )
    return {name: args[key] for key, name in _EXPERIMENT.items() if key in args}
