"""What a process learns from its options and environment variables."""

import pytest

import millrace as mr
from millrace.config import ConfigurationError, parse
from millrace.distributed import coordination, environment
from millrace.distributed.environment import (
    TIMEOUT,
    ProcessInfo,
    add_launcher_replicas,
    find_first_host,
    find_num_replicas,
    find_process_info,
    format_mistake,
    get_timeout,
)
from millrace.distributed.options import LaunchConfig
from millrace.plan import Plan

MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
SLURM = {
    **{"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
    **{"SLURM_JOB_ID": "200", "SLURM_STEP_ID": "3"},
}
IN_SLURM = ProcessInfo("n1:63547", 1, 2, "Slurm")
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "0"}
OURS = {
    "MILLRACE_COORDINATOR": "h-0.h:5",
    "MILLRACE_PROCESS_ID": "1",
    "MILLRACE_NUM_PROCESSES": "4",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "x"}, ProcessInfo(None, None, None, "Open MPI")),
        (
            MPI | {"JAX_COORDINATOR_ADDRESS": "h:1"},
            ProcessInfo("h:1", 1, 2, "Open MPI"),
        ),
        (SLURM, IN_SLURM),
        (SLURM | {"SLURM_STEP_ID": "4"}, IN_SLURM._replace(coordinator="n1:63548")),
        (SLURM | {"JAX_COORDINATOR_PORT": "5"}, IN_SLURM._replace(coordinator="n1:5")),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "h:5"}, IN_SLURM._replace(coordinator="h:5")),
        (
            SLURM | {"SLURM_GPUS_PER_TASK": "1"},
            IN_SLURM._replace(has_own_gpus=True),
        ),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (OURS, ProcessInfo("h-0.h:5", 1, 4)),
        (OURS | KUBERNETES | SLURM, ProcessInfo("h-0.h:5", 1, 4)),
        (KUBERNETES, ProcessInfo(None, None, None, "Kubernetes")),
        ({"KUBERNETES_SERVICE_HOST": "k"}, None),
    ],
)
def test_clusters_are_recognized_by_their_variables(variables, expected):
    assert find_process_info(environment=variables) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("a-b,c", "a-b"),
        ("node[001-015]", "node001"),
        ("node[007,9-10]-ib,login", "node007-ib"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_the_first_of_the_nodes_of_slurm_is_found(nodes, first):
    assert find_first_host(nodes) == first


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("h:1", None, 2), "must be given together"),
        (("h", 0, 2), "HOST:PORT"),
        (("h:x", 0, 2), "HOST:PORT"),
        (("h:1", 2, 2), "from 0 to 1"),
    ],
)
def test_invalid_process_options_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        find_process_info(*given, environment={})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MILLRACE_COORDINATOR": None}, "MILLRACE_COORDINATOR is not set. Set MILLRACE_C"),
        ({"MILLRACE_PROCESS_ID": None}, "MILLRACE_PROCESS_ID is not set"),
        ({"MILLRACE_NUM_PROCESSES": None}, "MILLRACE_NUM_PROCESSES is not set"),
        (
            {"MILLRACE_PROCESS_ID": "last"},
            "PROCESS_ID must be a number, got 'last'",
        ),
        ({"MILLRACE_PROCESS_ID": "4"}, "from 0 to 3 with 4 processes, got 4"),
        ({"MILLRACE_COORDINATOR": "h-0"}, "HOST:PORT of process 0, got 'h-0'"),
    ],
)
def test_invalid_variables_are_refused(changed, message):
    given = {k: v for k, v in (OURS | changed).items() if v is not None}
    with pytest.raises(ConfigurationError, match=message):
        find_process_info(environment=given)


@pytest.mark.parametrize("text", ["4", "61", "nan", "soon", ""])
def test_a_time_without_heartbeats_that_jax_would_not_wait_for_is_refused(
    text, monkeypatch
):
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(ConfigurationError, match="between 5 and 60 seconds, got '"):
        get_timeout()
    with pytest.raises(ConfigurationError, match="MILLRACE_PATIENCE_SECONDS must be"):
        mr.join_processes()
    monkeypatch.setenv(TIMEOUT, "45.5")
    assert get_timeout() == 45.5


def test_only_a_coordinator_on_the_loopback_is_local():
    assert ProcessInfo("127.0.0.1:5", 0, 2).is_local
    assert not ProcessInfo("10.0.0.1:5", 0, 2).is_local
    assert not ProcessInfo(None, None, None, "Slurm").is_local


def test_a_command_takes_the_replicas_of_the_launcher_and_reports_it(monkeypatch, capsys):
    monkeypatch.setenv("MILLRACE_NUM_REPLICAS", "4")
    args = add_launcher_replicas(Plan, ["--num-replicas=2"])
    assert parse(Plan, args, program="x")[0].num_replicas == 4
    expected = "--num-replicas is 2, but millrace launch sets it to 4. Using 4."
    assert expected in capsys.readouterr().err
    assert add_launcher_replicas(LaunchConfig, ["x"]) == ["x", "--num-replicas", "4"]


def test_the_last_number_of_replicas_on_a_command_line_counts():
    assert find_num_replicas(["--num-replicas", "2", "--replicas=3"]) == "3"
    assert find_num_replicas(["--num_replicas", "2"]) == "2"
    assert find_num_replicas(["train"]) is None


@pytest.fixture
def acting_as(monkeypatch, tmp_path):
    """Return a function that makes this a process of a launcher, or of a cluster."""
    monkeypatch.setattr(environment, "_MISTAKE_SECONDS", 0.1)

    def act(rank, *, is_launched):
        monkeypatch.setenv(environment.PROCESS_ID, str(rank))
        if is_launched:
            monkeypatch.setenv(environment.LAUNCH_DIR, str(tmp_path))

    return act


def test_a_mistake_that_all_processes_find_is_reported_by_the_first(acting_as):
    acting_as(0, is_launched=True)
    assert format_mistake("Unknown option.") == "Unknown option."
    acting_as(1, is_launched=True)
    assert format_mistake("Unknown option.") is None


def test_a_mistake_that_only_another_process_finds_is_reported(acting_as):
    acting_as(2, is_launched=False)
    assert format_mistake("There is no file.") == "process 2: There is no file."
    acting_as(2, is_launched=True)
    assert format_mistake("There is no file.") == "There is no file."
    acting_as(0, is_launched=True)
    format_mistake("Another mistake.")
    acting_as(2, is_launched=True)
    assert format_mistake("There is no file.") == "There is no file."


def test_what_is_found_together_is_reported_by_the_first(acting_as, monkeypatch):
    monkeypatch.setattr(coordination, "num_processes", lambda: 3)
    acting_as(1, is_launched=False)
    assert format_mistake("Process 1 differs.") is None
