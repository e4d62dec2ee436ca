"""The manifests of the examples are valid, and processes find one another with them."""

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import alone, assert_same_history, assert_same_weights, start, wait_for

from millrace.commands.registry import COMMANDS
from millrace.config import parse
from millrace.distributed.environment import ProcessInfo, find_process_info
from millrace.distributed.hardware import find_free_port
from millrace.distributed.launcher import WRONG_COMMAND
from millrace.distributed.signals import INTERRUPTED

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

JOBSET_SCHEMA = json.loads(
    Path(__file__).parents[1].joinpath("jobset_schema.json").read_text()
)


def documents(name: str) -> dict[str, Any]:
    """Return the documents of a manifest by kind."""
    loaded = yaml.safe_load_all((FOLDER / name).read_text())
    return {document["kind"]: document for document in loaded}


def job_of(name: str) -> dict[str, Any]:
    """Return the Job of a manifest; that of a JobSet as its controller creates it."""
    found = documents(name)
    if "Job" in found:
        return found["Job"]
    jobset = found["JobSet"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    template = copy.deepcopy(replicated["template"])
    template["spec"]["template"]["spec"]["subdomain"] = jobset["metadata"]["name"]
    full_name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": full_name},
        **template,
    }


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def environment_of(job: dict[str, Any], index: int) -> dict[str, str]:
    """Return the variables of a pod, as Kubernetes sets them."""
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    for entry in container_of(job)["env"]:
        if "value" in entry:
            variables[entry["name"]] = entry["value"]
        else:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            variables[entry["name"]] = str(index)
    return variables


each_manifest = pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])


@pytest.fixture(scope="module")
def schemas():
    return pytest.importorskip("kubernetes_validate")


@pytest.mark.parametrize("version", ["1.31", "newest"])
def test_the_documents_are_valid_in_old_and_new_versions_of_kubernetes(version, schemas):
    number = schemas.latest_version() if version == "newest" else version
    found = [*documents("job.yaml").values(), job_of("jobset.yaml")]
    assert [d["kind"] for d in found] == ["Service", "NetworkPolicy", "Job", "Job"]
    for document in found:
        schemas.validate(document, number, strict=True)


def test_a_misspelled_field_is_not_valid(schemas):
    job = job_of("job.yaml")
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(schemas.ValidationError, match="completion"):
        schemas.validate(job, schemas.latest_version(), strict=True)


def validate_jobset(jobset: dict[str, Any]) -> None:
    # It comes with kubernetes_validate.
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(jobset, JOBSET_SCHEMA)


def test_the_jobset_is_valid():
    validate_jobset(documents("jobset.yaml")["JobSet"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "network", "publishNotReadyAddress"), True),
        (("spec", "failurePolicy", "maxRestarts"), "10"),
        (("spec", "failurePolicy", "rules", 0, "action"), "Fail"),
        (("spec", "failurePolicy", "rules", 0, "onJobFailureReasons"), ["PodFailure"]),
        (("spec", "replicatedJobs", 0, "template", "completions"), 4),
        (("metadata", "name"), "Millrace"),
    ],
    ids=str,
)
def test_a_jobset_with_a_mistake_is_not_valid(path, value):
    jobset = documents("jobset.yaml")["JobSet"]
    place = jobset
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        validate_jobset(jobset)


@each_manifest
def test_every_pod_finds_process_0_and_its_own_number(name):
    job = job_of(name)
    count = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["parallelism"] == count
    # The host name of the first pod, as Kubernetes forms it.
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    first = f"{job['metadata']['name']}-0.{subdomain}:12345"
    for index in range(count):
        found = find_process_info(environment=environment_of(job, index))
        assert found == ProcessInfo(first, index, count)


def test_the_service_and_the_policy_are_about_the_pods_of_the_job():
    found = documents("job.yaml")
    job, service, policy = found["Job"], found["Service"], found["NetworkPolicy"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    labels = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == labels
    assert service["spec"]["clusterIP"] == "None"
    assert policy["spec"]["podSelector"]["matchLabels"] == labels


@each_manifest
def test_the_arguments_are_a_command_that_may_be_started_again(name):
    job = job_of(name)
    app, verb, *options = container_of(job)["args"]
    command = COMMANDS[f"{app} {verb}"]
    config, _ = parse(
        command.load_config_type(),
        options,
        program="millrace",
        named_configs=command.named_configs_path(),
    )
    assert config.run.auto_resume and config.run.run_dir is not None
    mounts = [mount["mountPath"] for mount in container_of(job)["volumeMounts"]]
    assert config.run.run_dir.is_relative_to(mounts[0])
    assert config.plan.batching.num_replicas % job["spec"]["completions"] == 0


@each_manifest
def test_a_wrong_command_is_not_started_again(name):
    job = job_of(name)
    actions = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert actions[WRONG_COMMAND] == "FailJob"
    # A JobSet replaces all pods, whatever ended them.
    assert actions.get(INTERRUPTED) == ("Ignore" if name == "job.yaml" else None)


class Pods:
    """Processes with the variables of pods, started again after they fail as by a Job."""

    BACKOFF = 10.0

    def __init__(self, command: list[str], count: int) -> None:
        self._command = command
        self._place = f"127.0.0.1:{find_free_port()}"
        job = job_of("job.yaml")
        own = {"MILLRACE_COORDINATOR": self._place, "MILLRACE_NUM_PROCESSES": str(count)}
        self._variables = [environment_of(job, index) | own for index in range(count)]
        self.pods = [self._start(index) for index in range(count)]
        self.num_failures = 0

    def _start(self, index: int) -> subprocess.Popen:
        given = [f"{name}={value}" for name, value in self._variables[index].items()]
        return start(["env", *given, *self._command])

    def replace(self, index: int) -> None:
        """Kill a pod and start another one in its place at once."""
        self.pods[index].kill()
        self.pods[index].wait()
        self.pods[index] = self._start(index)

    def finish(self) -> None:
        """Wait until all have succeeded."""
        deadline = time.monotonic() + 240
        running = set(range(len(self.pods)))
        while running:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            for index in list(running):
                status = self.pods[index].poll()
                if status == 0:
                    running.remove(index)
                elif status is not None:
                    self.num_failures += 1
                    time.sleep(self.BACKOFF)
                    self.pods[index] = self._start(index)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_that_is_replaced_makes_the_others_start_again(victim, tmp_path, undisturbed):
    directory = tmp_path / "run"
    own = ("--virtual-devices", "2", "--num-replicas", "4", "--delay", "0.1")
    pods = Pods(alone(directory, *own, "--auto-resume"), 2)
    wait_for(directory, 9, pods.pods[0])
    pods.replace(victim)
    pods.finish()
    assert 1 <= pods.num_failures <= 4
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)
