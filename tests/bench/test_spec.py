"""Named benchmarks: which there are, and what is said when one is not."""

import json

import pytest
from millrace.bench.building import configuration

from millrace.bench.spec import Entry, load_spec, select
from millrace.cli import main
from millrace.config import ConfigurationError

SHIPPED = load_spec(None)


def bench(*words):
    with pytest.raises(SystemExit) as left:
        main(["bench", *map(str, words)])
    return left.value.code


@pytest.fixture
def spec(tmp_path):
    def write(entries):
        path = tmp_path / "spec.yml"
        path.write_text(json.dumps(entries))  # which is YAML, too
        return path

    return write


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_every_shipped_entry_is_a_command_that_is_right(entry):
    configuration(entry)


def test_there_is_an_entry_for_each_batch_of_the_references():
    names = {entry.name for entry in select(SHIPPED, ["inference"])}
    batches = {
        "resnet50": (1, 4, 16, 32, 64, 90),
        "resnext101": (1, 2, 4, 8, 16),
        "efficientnet_b0": (1, 8, 16, 32),
    }
    assert names == {
        f"{network}_infer_b{size}" for network, sizes in batches.items() for size in sizes
    }


@pytest.mark.parametrize(
    ("name", "batch", "devices"),
    # The totals that the reference prints.
    [
        ("tf1_resnet50_train_m2000", 16_384, 4),
        ("tf1_resnet50_train_pod16", 16_384, 16),
        ("tf1_resnext101_train_m2000", 768, 4),
        ("tf1_resnext101_train_pod16", 768, 16),
        ("tf1_efficientnet_b4_train_m2000", 200, 4),
        ("tf1_efficientnet_b4_train_pod16", 800, 16),
    ],
)
def test_the_references_training_has_their_batches(name, batch, devices):
    (entry,) = select(SHIPPED, [name])
    config = configuration(entry)
    assert config.plan.batching.global_batch_size == batch
    assert config.plan.num_replicas * config.plan.num_stages == devices


def test_names_may_be_groups_and_patterns_and_keep_their_order():
    entries = [
        Entry(name="a_1", command="vcd train", groups=["some"]),
        Entry(name="b_1", command="vcd train"),
        Entry(name="a_2", command="vcd train"),
    ]
    assert select(entries, []) == entries
    assert [e.name for e in select(entries, ["a_2", "some"])] == ["a_1", "a_2"]
    assert [e.name for e in select(entries, ["*_1"])] == ["a_1", "b_1"]


def test_an_unknown_benchmark_is_told_the_known_ones(spec, capsys):
    path = spec({"first": {"command": "vcd train", "groups": ["quick"]}})
    assert bench("frist", "--spec", path) == 2
    said = capsys.readouterr().err
    assert "no benchmark frist" in said and "Did you mean first?" in said
    assert "There is: first; and the groups quick." in said


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"comand": "vcd train"}, "unknown option comand. Did you mean command?"),
        ({"comand": "vcd train"}, "There is: command, about, groups, batch_sizes"),
        ({"command": "vcd sample"}, "'vcd sample' cannot be measured. What can: cnn train"),
        ({"command": "cnn train --modle x"}, "Unknown option --modle. Did you mean"),
        ({"command": "cnn train --qqq"}, "--qqq. See millrace cnn train --help."),
        ({"command": "cnn train --model 'x"}, "cannot be read, no closing quotation"),
        ({"command": "cnn validate --batch-size 1 2"}, "give one batch size"),
        ({}, "has no command"),
        ({"command": None}, "has no command"),
        ({"command": "vcd train", "batch_sizes": "many"}, "--batch-sizes"),
        ("vcd train", "is not a mapping"),
        ({"command": "vcd train", "needs": "tpu"}, "needs must be gpu or cpu"),
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused_before_anything_is_measured(entry, said, spec, capsys):
    path = spec({"x": entry})
    assert bench("--spec", path) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error and f"{path}: benchmark x" in error


def test_a_variable_of_the_environment_says_where_data_are(monkeypatch):
    entry = Entry(name="x", command="cnn train --data-dir $DATASETS_DIR/")
    monkeypatch.setenv("DATASETS_DIR", "/somewhere")
    assert str(configuration(entry).data.dataset_path) == "/somewhere"


def test_batch_sizes_make_an_entry_each():
    entry = Entry(name="x", command="cnn validate", batch_sizes=[1, 8])
    assert [e.name for e in entry.expanded()] == ["x_b1", "x_b8"]
    assert [configuration(e).batch_size for e in entry.expanded()] == [[1], [8]]
    with pytest.raises(ConfigurationError, match="give one batch size"):
        configuration(Entry(name="x", command="cnn validate --batch-size 1 2"))


def test_entries_are_listed(capsys):
    assert bench("training", "--list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed][:2] == [
        "resnet50_train_b256",
        "resnet50_train_b512",
    ]
