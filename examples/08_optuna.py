"""Tune a learning rate with Optuna, and stop bad trials early.

A callback reports the accuracy of every epoch and ends training once Optuna prunes the
trial. Run ``pip install optuna`` first.
"""

import tempfile
from pathlib import Path

import optuna

import millrace as mr


class Prune(mr.Callback):
    """Ends a trial that is worse than the median of the others."""

    def __init__(self, trial):
        self.trial = trial

    def on_validation(self, event):
        self.trial.report(event["validation_accuracy"], step=round(event["epoch"]))
        return self.trial.should_prune()


def objective(trial):
    """Train a small CNN on the bundled digits; return its accuracy."""
    result = mr.cnn.train(
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 1.0, log=True),
        num_epochs=4,
        micro_batch_size=64,
        run_dir=Path(tempfile.mkdtemp()) / f"trial-{trial.number}",
        quiet=True,
        callbacks=[Prune(trial)],
    )
    if result.summary.get("stopped_by") == "Prune":
        raise optuna.TrialPruned
    return result.best.value


optuna.logging.set_verbosity(optuna.logging.WARNING)
pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
study = optuna.create_study(
    direction="maximize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=0)
)
study.enqueue_trial({"learning_rate": 0.1})
study.enqueue_trial({"learning_rate": 0.0001})
study.optimize(objective, n_trials=3)
for trial in study.trials:
    epochs = len(trial.intermediate_values)
    print(f"{trial.params}: {trial.state.name} after {epochs} validations")
print(f"best accuracy {study.best_value:.3f} with {study.best_params}")
