"""Training from the command line on a small file of ratings."""

import re
import shutil

import jax
import numpy as np
import pytest
from autoencoder_runs import PLAIN, SMALL, command, events_of, summary_of, write_ratings

from millrace.apps.autoencoder.evaluate import Validator
from millrace.apps.autoencoder.halving import has_stopped_improving
from millrace.apps.autoencoder.predictor import load_recommender

# A learning rate that suits so few users, as an exponent of 2.
LEARN = f"train {SMALL} --base-learning-rate -10 --batches-per-step 3 --untied-decoder "


def load_params(folder):
    return load_recommender(folder, "last").params


def assert_same(some, others):
    for part in ("encoder", "decoder"):
        for name, layer in some[part].items():
            for kind, array in layer.items():
                np.testing.assert_array_equal(array, others[part][name][kind])


def delete_checkpoints_but_first(run):
    for path in sorted((run / "checkpoints").glob("update-*"))[1:]:
        shutil.rmtree(path)


def test_a_run_learns_and_a_resumed_one_ends_with_the_same_bits(tmp_path, capsys):
    files = write_ratings(tmp_path, extra="1000\t9999\t3\n7\t500\t3\n")
    args = f"{LEARN}{files}--epochs 12 --steps-per-log 2 --valid-per-epoch 0.25 "
    args += "--detached-refeeding "
    ended = command(capsys, args + f"--run-dir {tmp_path}/whole")
    assert ended.status == 0, ended.err
    assert "2 validation ratings" in ended.err and "1 users and 1 items" in ended.err
    events = events_of(tmp_path / "whole")
    errors = [e["validation_rmse"] for e in events if "validation_rmse" in e]
    assert len(errors) == 3 and errors[-1] < 0.9 * errors[0]
    summary = summary_of(tmp_path / "whole")
    assert summary["best"]["validation_rmse"] == min(errors)
    assert summary["updates"] == 144 and summary["samples"] == 144 * 8
    # In parts: the initial weights, then all of it, then all but the first part again.
    parts = tmp_path / "parts"
    args += f"--run-dir {parts} --keep-checkpoints 9 "
    assert command(capsys, args + "--build-init").status == 0
    assert summary_of(parts)["updates"] == 0
    assert not load_params(parts)["decoder"]["fc_3"]["bias"].any()
    assert command(capsys, args + "--resume --data-on-device").status == 0
    shutil.rmtree(parts / "checkpoints" / "update-000000000")
    delete_checkpoints_but_first(parts)
    assert command(capsys, args + "--resume").status == 0
    assert_same(load_params(tmp_path / "whole"), load_params(parts))
    assert len(events_of(parts)) == len(events)


def test_a_run_without_validation_writes_one_checkpoint_and_tests_it(tmp_path, capsys):
    args = f"{LEARN}{write_ratings(tmp_path)}--epochs 1 --no-dense-refeeding "
    args += f"--no-validation --valid-per-epoch 0 --test-data-file {tmp_path}/valid.txt "
    args += f"--run-dir {tmp_path}/run"
    ended = command(capsys, args)
    assert ended.status == 0, ended.err
    assert len(list((tmp_path / "run" / "checkpoints").glob("update-*"))) == 1
    summary = summary_of(tmp_path / "run")
    assert summary["metrics"]["test_rmse"] > 0
    assert not {"best", "baselines"} & summary.keys()


@pytest.mark.devices(3)
def test_a_run_stops_early_and_reports_its_best_checkpoint(tmp_path, capsys):
    # The learning rate is far too large, so the run soon stops improving.
    args = f"train {PLAIN} --learning-rate 0.2 --epochs 400 --early-stopping 2 "
    args += "--no-dense-refeeding --select-devices 1,2 "
    args = args.replace("--quiet", "") + write_ratings(tmp_path)
    ended = command(capsys, args + f"--run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    assert "no improvement in 2 validations" in ended.err
    summary = summary_of(tmp_path / "run")
    events = events_of(tmp_path / "run")
    errors = [float(e["validation_rmse"]) for e in events if "validation_rmse" in e]
    assert summary["status"] == "completed" and summary["stopped_early"]
    assert len(errors) < 400
    ranked = [float("inf") if np.isnan(error) else error for error in errors]
    assert has_stopped_improving(ranked, 2) and not has_stopped_improving(ranked[:-1], 2)
    again = command(capsys, args + f"--run-dir {tmp_path}/run --resume")
    assert again.status == 0 and "it stopped early" in again.err
    assert summary_of(tmp_path / "run")["updates"] == summary["updates"]
    # It was killed after the last validation, and then before its checkpoint was written.
    for is_saved in (True, False):
        (tmp_path / "run" / "summary.json").unlink()
        if not is_saved:
            shutil.rmtree(sorted((tmp_path / "run" / "checkpoints").glob("update-*"))[-1])
        again = command(capsys, args + f"--run-dir {tmp_path}/run --resume")
        assert again.status == 0, again.err
        found = summary_of(tmp_path / "run")
        for name in ("status", "stopped_early", "updates", "metrics"):
            assert found[name] == summary[name]
        assert found["best"]["value"] == summary["best"]["value"]


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tmp_path, capsys):
    # After half of the six steps, the learning rate becomes far too large.
    args = f"{LEARN}{write_ratings(tmp_path)}--epochs 3 --no-dense-refeeding "
    args += "--learning-rate-decay 1,1e9 --learning-rate-schedule 0.5 --steps-per-log 9 "
    ended = command(capsys, args + f"--run-dir {tmp_path}/run")
    assert ended.status == 1
    output = " ".join(ended.err.split())
    assert re.search(r"The loss is (nan|inf) at update 1[3-8] \(epoch 2\.\d+\):", output)
    assert "has diverged. Start again with a smaller learning rate." in output
    assert "Traceback" not in output and "fp_exceptions would stop" not in output
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed" and "diverged" in summary["error"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["update-000000006", "update-000000012"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(load_params(tmp_path / "run")))


def test_a_diverged_state_is_not_saved(tmp_path, capsys):
    # One update per step, validated before the next loss could be non-finite.
    args = f"{LEARN}{write_ratings(tmp_path)}--epochs 1 --no-dense-refeeding "
    args += "--batches-per-step 1 --valid-per-epoch 6 --base-learning-rate 100 "
    ended = command(capsys, args + f"--run-dir {tmp_path}/run")
    assert ended.status == 1
    assert "The validation RMSE is nan after update 1: training has" in ended.err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("errors", "stopped"),
    [
        ([3, 2, 1], False),
        ([1, 2], False),
        ([1, 2, 3], True),
        ([1, 2, 0.5], False),
        ([2, 1, 1, 1], True),
        ([1, float("nan"), float("nan")], True),
    ],
)
def test_a_run_has_stopped_improving_after_two_validations_without_a_new_best(
    errors, stopped
):
    assert has_stopped_improving(errors, 2) == stopped


def test_random_ratings_cause_a_warning_and_train_in_sixteen_bits(tmp_path, capsys):
    sizes = "--num-users 100 --num-items 30 --num-ratings 900 --batch-size 16"
    args = f"train {sizes} --no-dense-refeeding --no-validation --run-dir {tmp_path}/run"
    ended = command(capsys, args + " --quiet")
    assert ended.status == 0, ended.err
    assert "THE RATINGS ARE RANDOM" in ended.err
    assert summary_of(tmp_path / "run")["updates"] == 12
    weights = load_params(tmp_path / "run")
    assert weights["encoder"]["fc_1"]["kernel"].dtype == np.float16


@pytest.mark.parametrize("devices", ["", "--select-devices 0,0"])
def test_async_validation_gives_the_same_results(tmp_path, capsys, devices, monkeypatch):
    started, run_async = [], Validator.run_async
    monkeypatch.setattr(
        Validator, "run_async", lambda self: started.append(1) or run_async(self)
    )
    files = write_ratings(tmp_path)
    args = f"{LEARN}{files}--epochs 6 --valid-per-epoch 0.5 --keep-checkpoints 9 "
    args += "--deterministic "
    for name, how in (("sync", ""), ("async", f"--multiprocessing {devices}")):
        ended = command(capsys, f"{args}{how} --run-dir {tmp_path}/{name}")
        assert ended.status == 0, ended.err
    in_sync, in_async = tmp_path / "sync", tmp_path / "async"
    assert_same(load_params(in_sync), load_params(in_async))
    found = [
        {
            e["update"]: e["validation_rmse"]
            for e in events_of(run)
            if "validation_rmse" in e
        }
        for run in (in_sync, in_async)
    ]
    assert found[0] == found[1] and len(found[0]) == 3
    assert len(started) == 1  # by the second run only
    assert summary_of(in_sync)["best"] == summary_of(in_async)["best"]


def test_ids_that_were_half_written_are_written_again(tmp_path, capsys, monkeypatch):
    args = f"{LEARN}{write_ratings(tmp_path)}--build-init --run-dir {tmp_path}/run "

    def save_half(file, array, real=np.save):
        path = str(getattr(file, "name", file))
        if "run" not in path or "items.npy" not in path:
            return real(file, array)
        with open(path, "wb") as half:
            half.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", save_half)
        assert command(capsys, args).status == 1
    assert not (tmp_path / "run" / "items.npy").exists()
    ended = command(capsys, args + "--resume")
    assert ended.status == 0, ended.err
    assert len(np.load(tmp_path / "run" / "items.npy")) == 30


@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_run_is_not_resumed_with_other_ratings(tmp_path, capsys, part):
    files = write_ratings(tmp_path)
    args = f"{LEARN}{files}--epochs 1 --run-dir {tmp_path}/run "
    assert command(capsys, args + "--build-init").status == 0
    path = tmp_path / f"{part}.txt"
    before = path.read_text()
    path.write_text(before.replace("\t3\n", "\t4\n"))
    assert path.read_text() != before
    summary = summary_of(tmp_path / "run")
    ended = command(capsys, args + "--resume")
    assert ended.status == 2 and f"{part}.txt has changed since the run" in ended.err
    assert summary_of(tmp_path / "run") == summary
    path.write_text(before)
    assert command(capsys, args + "--resume").status == 0


def test_a_model_finds_its_ratings_from_another_working_directory(
    tmp_path, capsys, monkeypatch
):
    write_ratings(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = "--training-data-file train.txt --validation-data-file valid.txt "
    args = f"{LEARN}{files}--epochs 1 --run-dir run"
    assert command(capsys, args).status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = command(capsys, "validate --checkpoint ../run --run-dir found")
    assert ended.status == 0 and "has changed" not in ended.err, ended.err
    with (tmp_path / "train.txt").open("a") as file:
        file.write("1001\t500\t1\n")
    ended = command(capsys, "validate --checkpoint ../run --run-dir again")
    assert "train.txt has changed since the run was trained on it." in ended.err


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("1\t2\t3\n1\t2\n", 1, "train.txt, line 2"),
        ("1\t2\t9\n", 1, "line 1"),
        ("", 1, "empty"),
        ("1\t2\t3\n", 2, "1 users with ratings, fewer than one batch of 8"),
        (None, 2, "There is no file"),
    ],
)
def test_a_bad_file_is_reported_and_the_run_directory_can_be_used_again(
    tmp_path, capsys, text, status, message
):
    path = tmp_path / "train.txt"
    if text is not None:
        path.write_text(text)
    ended = command(
        capsys,
        f"train {PLAIN} --training-data-file {path} --run-dir {tmp_path}/run",
    )
    assert ended.status == status
    assert message in ended.err and "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) <= 2
    assert (tmp_path / "run").exists() == (status == 1)
    if status == 1:
        assert summary_of(tmp_path / "run")["status"] == "failed"
        again = f"train {PLAIN} --training-data-file {path} --run-dir {tmp_path}/run"
        assert message in command(capsys, again).err


def test_a_device_that_does_not_exist_is_rejected(tmp_path, capsys):
    ended = command(capsys, f"train --select-ipus 99 --run-dir {tmp_path}/run")
    assert ended.status == 2
    assert "asks for device 99, but there are only" in ended.err
