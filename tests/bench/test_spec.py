"""The spec of named benchmarks, and errors about wrong ones."""

import collections
import json
import re
from pathlib import Path

import pytest

import millrace.bench
from millrace.apps.autoencoder.program import plan_steps
from millrace.apps.cnn.train import plan_events
from millrace.apps.vcd.train import build_schedule
from millrace.bench.applications import _count_devices
from millrace.bench.spec import Entry, load_spec, parse_command, select_entries
from millrace.cli import main
from millrace.config import ConfigurationError, as_plain

SHIPPED = load_spec(None)


def bench(*arguments):
    with pytest.raises(SystemExit) as left:
        main(["bench", *map(str, arguments)])
    return left.value.code


@pytest.fixture
def spec(tmp_path):
    def write(entries):
        path = tmp_path / "spec.yml"
        path.write_text(json.dumps(entries))  # JSON is YAML, too
        return path

    return write


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_every_shipped_entry_is_a_valid_command(entry):
    parse_command(entry)


def test_there_is_an_entry_for_each_reference_batch_size():
    names = {entry.name for entry in select_entries(SHIPPED, ["inference"])}
    batches = {
        "resnet50": (1, 4, 16, 32, 64, 90),
        "resnext101": (1, 2, 4, 8, 16),
        "efficientnet_b0": (1, 8, 16, 32),
    }
    assert names == {
        f"{network}_infer_b{size}" for network, sizes in batches.items() for size in sizes
    }


def test_names_select_by_group_and_pattern_in_the_order_of_the_spec():
    entries = [
        Entry(name="a_1", command="vcd train", groups=["some"]),
        Entry(name="b_1", command="vcd train"),
        Entry(name="a_2", command="vcd train"),
    ]
    assert select_entries(entries, []) == entries
    assert [e.name for e in select_entries(entries, ["a_2", "some"])] == ["a_1", "a_2"]
    assert [e.name for e in select_entries(entries, ["*_1"])] == ["a_1", "b_1"]


def test_the_error_for_an_unknown_benchmark_lists_the_known_ones(spec, capsys):
    path = spec({"first": {"command": "vcd train", "groups": ["quick"]}})
    assert bench("frist", "--spec", path) == 2
    error = capsys.readouterr().err
    assert "no benchmark frist" in error and "Did you mean first?" in error
    assert "Groups: quick. --list shows the entries." in error


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"comand": "vcd train"}, "unknown option comand. Did you mean command?"),
        ({"comand": "vcd train"}, "Known options: command, about, groups, batch_sizes"),
        (
            {"command": "vcd sample"},
            "'vcd sample' cannot be measured. Commands that can: cnn train",
        ),
        ({"command": "cnn train --modle x"}, "Unknown option --modle. Did you mean"),
        ({"command": "cnn train --qqq"}, "--qqq. See millrace cnn train --help."),
        (
            {"command": "cnn train --model 'x"},
            "cannot parse the command, no closing quotation",
        ),
        ({"command": "cnn validate --batch-size 1 2"}, "must have one batch size"),
        ({}, "has no command"),
        ({"command": None}, "has no command"),
        ({"command": "vcd train", "batch_sizes": "many"}, "--batch-sizes"),
        ("vcd train", "is not a mapping"),
        ({"command": "vcd train", "needs": "tpu"}, "needs must be gpu or cpu"),
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused_before_anything_is_measured(entry, message, spec, capsys):
    path = spec({"x": entry})
    assert bench("--spec", path) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and f"{path}: benchmark x" in error


def test_environment_variables_in_a_command_are_expanded(monkeypatch):
    entry = Entry(name="x", command="cnn train --data-dir $DATASETS_DIR/")
    monkeypatch.setenv("DATASETS_DIR", "/somewhere")
    assert str(parse_command(entry).data.dataset_path) == "/somewhere"


def test_batch_sizes_expand_to_one_entry_each():
    entry = Entry(name="x", command="cnn validate", batch_sizes=[1, 8])
    assert [e.name for e in entry.expand()] == ["x_b1", "x_b8"]
    assert [parse_command(e).batch_size for e in entry.expand()] == [[1], [8]]
    with pytest.raises(ConfigurationError, match="must have one batch size"):
        parse_command(Entry(name="x", command="cnn validate --batch-size 1 2"))


def test_entries_are_listed(capsys):
    assert bench("training", "--list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed][:2] == [
        "resnet50_train_b256",
        "resnet50_train_b512",
    ]


GRAPHCORE = load_spec(Path(millrace.bench.__file__).with_name("graphcore.yml"))


@pytest.mark.parametrize("entry", GRAPHCORE, ids=lambda entry: entry.name)
def test_the_lines_of_the_documents_fit_on_one_device(entry):
    config = parse_command(entry)
    assert _count_devices(entry.application, config) == 1
    assert entry.lines and entry.reference


TRAINING = [entry for entry in GRAPHCORE if entry.application != "cnn validate"]


@pytest.mark.parametrize("entry", TRAINING, ids=lambda entry: entry.name)
def test_the_lines_divide_into_executions(entry):
    config = parse_command(entry)
    if entry.application == "cnn train":
        plan_events(config, 1_281_167)
    elif entry.application == "vcd train":
        assert build_schedule(config, 50_000).updates_per_execution >= 100
    else:
        plan_steps(config, config.data.num_users or 480_000)


@pytest.mark.parametrize(
    ("name", "batch", "precision"),
    [
        ("gc_resnet50_train", 16_384, "16.32"),
        ("gc_resnext101_train", 768, "16.16"),
        ("gc_efficientnet_b4_train", 200, "16.32"),
    ],
)
def test_the_lines_keep_their_batch_and_precision_on_one_device(name, batch, precision):
    (entry,) = select_entries(GRAPHCORE, [name])
    plan = parse_command(entry).plan
    assert (plan.batching.global_batch_size, plan.precision) == (batch, precision)


# What may differ between a line and its entry, by the document.
CUT = {
    "000": {
        *("training_data_file", "validation_data_file", "num_users", "num_items"),
        *("num_ratings", "size", "batch_size", "recipe_reason"),
    },
    "001": {"results_dir", "run_dir"},
    "003": {
        *("num_replicas", "gradient_accumulation_count", "device_mapping"),
        *("synthetic_data", "generated_data", "updates_per_execution"),
        *("num_epochs", "lr_schedule_params", "standard_imagenet"),
    },
}
MEASURED_LINES = [
    (seed, line)
    for seed, line in (
        text.split("\t")
        for text in (Path(__file__).parents[1] / "seed_lines.txt").read_text().splitlines()
    )
    if seed in CUT and ".py" in line and "config.json" not in line
]


def read_line(line):
    """Return the configuration of a line, without the processes that it starts."""
    program, arguments = re.search(r"(\w+\.py)(.*)", line).groups()
    return parse_command(Entry(name="x", command=f"{program} {arguments}"))


@pytest.mark.parametrize(("seed", "line"), MEASURED_LINES)
def test_every_line_with_a_speed_has_an_entry_that_only_cuts_it(seed, line, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "/datasets")
    wanted = read_line(line)
    resolved = ("resolved_batch_size", "resolved_size")

    def is_a_cut(entry):
        config = parse_command(entry)
        if type(config) is not type(wanted):
            return False
        ours, theirs = as_plain(config), as_plain(wanted)
        differing = {name for name in theirs if ours[name] != theirs[name]} - {"seed"}
        same = all(getattr(config, n, 0) == getattr(wanted, n, 0) for n in resolved)
        return differing <= CUT[seed] and same

    found = [entry for entry in GRAPHCORE if is_a_cut(entry)]
    assert found, line
    assert any("_other" not in entry.name for entry in found)


def test_every_batch_size_of_inference_has_an_entry():
    sizes = collections.defaultdict(set)
    for entry in GRAPHCORE:
        if entry.application == "cnn validate":
            name, size = entry.name.rsplit("_b", 1)
            sizes[name.removesuffix("_other")].add(int(size))
    assert sizes == {
        "gc_resnet50_infer": {1, 4, 16, 32, 64, 90},
        "gc_resnext101_infer": {1, 2, 4, 8, 16},
        "gc_efficientnet_b0_infer": {1, 8, 16, 32},
        "gc_resnet50_infer_host": {1, 4, 16, 32, 64, 80},
        "gc_resnext101_infer_host": {1, 2, 4, 8, 16},
        "gc_efficientnet_b0_infer_host": {1, 8, 16, 32},
    }


# Files of the reference


def reference(**changes):
    values = {
        "description": "Training\n  of a model",
        "cmd": "python3 main.py --config-file=configs/benchmark_config.json -b 3072",
        "location": "public_examples/somewhere",
        "data": {"time": {"regexp": "Time: (.*)"}},
        "derived": {"throughput": {"expr": "1 / {time}"}},
        "output": [["Images/sec", "throughput"]],
    }
    return values | changes


def test_entries_of_the_reference_are_read(spec):
    path = spec({"common": {"env": {"A": "1"}, "data": {}}, "vae": reference()})
    (entry,) = load_spec(path)
    assert (entry.name, entry.application, entry.about) == (
        *("vae", "vcd train"),
        "Training of a model",
    )
    config = parse_command(entry)
    assert config.plan.micro_batch_size == 3072 and config.training.num_epochs == 200


def test_poprun_becomes_replicas_and_parameters_become_variants(spec):
    command = (
        "poprun --num-replicas 4 --ipus-per-replica 1 --num-instances 4 python3 "
        "validation.py --model resnet --batch-size {size} --synthetic-data"
    )
    listed = [["size"], [1], [8]]
    for parameters in ({"size": [1, 8]}, listed):
        entries = load_spec(spec({"x": reference(cmd=command, parameters=parameters)}))
        assert [entry.name for entry in entries] == ["x_size_1", "x_size_8"]
        configs = [parse_command(entry) for entry in entries]
        assert [config.batch_size for config in configs] == [[1], [8]]
        assert {(c.num_replicas, c.precision) for c in configs} == {(4, "16.16")}


def test_variables_of_an_entry_are_set_and_may_not_differ(spec, monkeypatch, capsys):
    monkeypatch.setenv("GC_TEST", "")
    entry = reference(cmd="python3 train.py --data-dir $GC_TEST", env={"GC_TEST": "here"})
    (found,) = load_spec(spec({"x": entry}))
    assert str(parse_command(found).data.dataset_path) == "here"
    other = reference(env={"GC_TEST": "there"})
    assert bench("--spec", spec({"x": entry, "y": other})) == 2
    assert "Measure them one at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cmd": "python3 run_gcn.py"}, "cmd must run one of train.py"),
        ({"outputs": []}, "unknown option outputs. Did you mean output?"),
        ({"parameters": [1]}, "parameters must be a mapping of lists"),
        ({"parameters": [["a", "b"], [1]]}, "a value for each of a, b; got [1]"),
        ({"cmd": "python3 main.py {x}", "parameters": {"y": [1]}}, "cannot fill in"),
    ],
    ids=str,
)
def test_a_wrong_entry_of_the_reference_is_refused(changes, message, spec, capsys):
    path = spec({"x": reference(**changes)})
    assert bench("--spec", path) == 2
    assert message in capsys.readouterr().err
