"""Training as a user calls it, on a small file of ratings."""

import re
import shutil

import jax
import numpy as np
import pytest
from autoencoder_runs import SMALL, command, events_of, summary_of, write_ratings

from millrace.apps.autoencoder.early_stopping import has_stopped_improving
from millrace.apps.autoencoder.trained import find_trained

# A learning rate at which these few users are learned, as Graphcore writes it.
LEARN = f"train {SMALL} --base-learning-rate -10 --batches-per-step 3 --untied-decoder "


def weights_of(folder):
    params, _ = find_trained(folder, newest=True).weights()
    return params


def assert_same(some, others):
    for part in ("encoder", "decoder"):
        for name, layer in some[part].items():
            for kind, array in layer.items():
                np.testing.assert_array_equal(array, others[part][name][kind])


def delete_checkpoints_but_first(run):
    for path in sorted((run / "checkpoints").glob("update-*"))[1:]:
        shutil.rmtree(path)


def test_a_run_learns_and_one_in_parts_ends_with_the_same_bits(tmp_path, capsys):
    files = write_ratings(tmp_path, extra="1000\t9999\t3\n7\t500\t3\n")
    words = f"{LEARN}{files}--epochs 12 --steps-per-log 2 --valid-per-epoch 0.25 "
    words += "--detached-refeeding "
    ended = command(capsys, words + f"--run-dir {tmp_path}/whole")
    assert ended.status == 0, ended.err
    assert "2 of the ratings" in ended.err and "1 users and 1 items" in ended.err
    events = events_of(tmp_path / "whole")
    errors = [e["validation_rmse"] for e in events if "validation_rmse" in e]
    assert len(errors) == 3 and errors[-1] < 0.9 * errors[0]
    summary = summary_of(tmp_path / "whole")
    assert summary["best"]["validation_rmse"] == min(errors)
    assert summary["updates"] == 144 and summary["samples"] == 144 * 8
    # In parts: the first weights, then all of it, then all but the first part again.
    parts = tmp_path / "parts"
    words += f"--run-dir {parts} --keep-checkpoints 9 "
    assert command(capsys, words + "--build-init").status == 0
    assert summary_of(parts)["updates"] == 0
    assert not weights_of(parts)["decoder"]["fc_3"]["bias"].any()
    assert command(capsys, words + "--resume --data-on-device").status == 0
    shutil.rmtree(parts / "checkpoints" / "update-000000000")
    delete_checkpoints_but_first(parts)
    assert command(capsys, words + "--resume").status == 0
    assert_same(weights_of(tmp_path / "whole"), weights_of(parts))
    assert len(events_of(parts)) == len(events)


def test_a_run_of_a_single_checkpoint_needs_no_validation(tmp_path, capsys):
    words = f"{LEARN}{write_ratings(tmp_path)}--epochs 1 --no-dense-refeeding "
    words += f"--no-validation --valid-per-epoch 0 --run-dir {tmp_path}/run"
    ended = command(capsys, words)
    assert ended.status == 0, ended.err
    assert len(list((tmp_path / "run" / "checkpoints").glob("update-*"))) == 1
    assert "best" not in summary_of(tmp_path / "run")


@pytest.mark.devices(3)
def test_a_run_stops_early_and_names_its_best(tmp_path, capsys):
    # Far too large a learning rate, so that it soon gets no better.
    words = f"train {SMALL} --learning-rate 0.2 --epochs 400 --early-stopping 2 "
    words += "--no-dense-refeeding --select-devices 1,2 "
    words = words.replace("--quiet", "") + write_ratings(tmp_path)
    ended = command(capsys, words + f"--run-dir {tmp_path}/run")
    assert ended.status == 0, ended.err
    assert "no better for 2 validations" in ended.err
    summary = summary_of(tmp_path / "run")
    events = events_of(tmp_path / "run")
    errors = [float(e["validation_rmse"]) for e in events if "validation_rmse" in e]
    assert summary["status"] == "completed" and summary["stopped_early"]
    assert len(errors) < 400
    ranked = [float("inf") if np.isnan(error) else error for error in errors]
    assert has_stopped_improving(ranked, 2) and not has_stopped_improving(ranked[:-1], 2)
    again = command(capsys, words + f"--run-dir {tmp_path}/run --resume")
    assert again.status == 0 and "it has stopped early" in again.err
    assert summary_of(tmp_path / "run")["updates"] == summary["updates"]


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tmp_path, capsys):
    # After half of its six steps, the learning rate is beyond all measure.
    words = f"{LEARN}{write_ratings(tmp_path)}--epochs 3 --no-dense-refeeding "
    words += "--learning-rate-decay 1,1e9 --learning-rate-schedule 0.5 --steps-per-log 9 "
    ended = command(capsys, words + f"--run-dir {tmp_path}/run")
    assert ended.status == 1
    said = " ".join(ended.err.split())
    assert re.search(r"The loss is (nan|inf) at update 1[3-8] \(epoch 2\.\d+\):", said)
    assert "has diverged. Start again with a smaller learning rate." in said
    assert "Traceback" not in said and "Training continues" not in said
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "failed" and "diverged" in summary["error"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["update-000000006", "update-000000012"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights_of(tmp_path / "run")))


def test_weights_that_were_lost_in_the_last_update_are_not_kept(tmp_path, capsys):
    # One update a step, and a validation after each: the loss does not know yet.
    words = f"{LEARN}{write_ratings(tmp_path)}--epochs 1 --no-dense-refeeding "
    words += "--batches-per-step 1 --valid-per-epoch 6 --learning-rate 1e38 "
    ended = command(capsys, words + f"--run-dir {tmp_path}/run")
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
def test_a_run_has_stopped_improving_after_two_no_better(errors, stopped):
    assert has_stopped_improving(errors, 2) == stopped


def test_random_ratings_are_said_loudly_and_train_in_sixteen_bits(tmp_path, capsys):
    sizes = "--num-users 100 --num-items 30 --num-ratings 900 --batch-size 16"
    words = f"train {sizes} --no-dense-refeeding --no-validation --run-dir {tmp_path}/run"
    ended = command(capsys, words + " --quiet")
    assert ended.status == 0, ended.err
    assert "THE RATINGS ARE RANDOM" in ended.err
    assert summary_of(tmp_path / "run")["updates"] == 12
    weights = weights_of(tmp_path / "run")
    assert weights["encoder"]["fc_1"]["kernel"].dtype == np.float16


@pytest.mark.parametrize("devices", ["", "--select-devices 0,0"])
def test_validation_beside_training_finds_the_same(tmp_path, capsys, devices):
    files = write_ratings(tmp_path)
    words = f"{LEARN}{files}--epochs 6 --valid-per-epoch 0.5 --keep-checkpoints 9 "
    words += "--deterministic "
    for name, how in (("in_turn", ""), ("beside", f"--multiprocessing {devices}")):
        ended = command(capsys, f"{words}{how} --run-dir {tmp_path}/{name}")
        assert ended.status == 0, ended.err
    in_turn, beside = tmp_path / "in_turn", tmp_path / "beside"
    assert_same(weights_of(in_turn), weights_of(beside))
    found = [
        {
            e["update"]: e["validation_rmse"]
            for e in events_of(run)
            if "validation_rmse" in e
        }
        for run in (in_turn, beside)
    ]
    assert found[0] == found[1] and len(found[0]) == 3
    assert summary_of(in_turn)["best"] == summary_of(beside)["best"]


@pytest.mark.parametrize("part", ["train", "valid"])
def test_a_run_is_not_resumed_with_other_ratings(tmp_path, capsys, part):
    files = write_ratings(tmp_path)
    words = f"{LEARN}{files}--epochs 1 --run-dir {tmp_path}/run "
    assert command(capsys, words + "--build-init").status == 0
    path = tmp_path / f"{part}.txt"
    before = path.read_text()
    path.write_text(before.replace("\t3\n", "\t4\n"))
    assert path.read_text() != before
    account = summary_of(tmp_path / "run")
    ended = command(capsys, words + "--resume")
    assert ended.status == 2 and f"{part}.txt has changed since the run" in ended.err
    assert summary_of(tmp_path / "run") == account
    path.write_text(before)
    assert command(capsys, words + "--resume").status == 0


def test_a_model_finds_its_ratings_from_another_folder(tmp_path, capsys, monkeypatch):
    write_ratings(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = "--training-data-file train.txt --validation-data-file valid.txt "
    words = f"{LEARN}{files}--epochs 1 --run-dir run"
    assert command(capsys, words).status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = command(capsys, "validate --checkpoint ../run --run-dir found")
    assert ended.status == 0 and "has changed" not in ended.err, ended.err
    with (tmp_path / "train.txt").open("a") as file:
        file.write("1001\t500\t1\n")
    ended = command(capsys, "validate --checkpoint ../run --run-dir again")
    assert "train.txt has changed since the run was trained on it." in ended.err


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("1\t2\t3\n1\t2\n", 1, "train.txt, line 2"),
        ("1\t2\t9\n", 1, "line 1"),
        ("", 1, "empty"),
        ("1\t2\t3\n", 2, "1 users with ratings, fewer than one batch of 8"),
        (None, 2, "There is no file"),
    ],
)
def test_a_bad_file_is_named_and_its_place_is_free_for_the_next_attempt(
    tmp_path, capsys, text, status, said
):
    path = tmp_path / "train.txt"
    if text is not None:
        path.write_text(text)
    ended = command(
        capsys, f"train {SMALL} --training-data-file {path} --run-dir {tmp_path}/run"
    )
    assert ended.status == status
    assert said in ended.err and "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) <= 2
    assert (tmp_path / "run").exists() == (status == 1)
    if status == 1:
        assert summary_of(tmp_path / "run")["status"] == "failed"
        again = f"train {SMALL} --training-data-file {path} --run-dir {tmp_path}/run"
        assert said in command(capsys, again).err


def test_a_device_that_is_not_there_is_refused(tmp_path, capsys):
    ended = command(capsys, f"train --select-ipus 99 --run-dir {tmp_path}/run")
    assert ended.status == 2
    assert "asks for device 99, but there are only" in ended.err
