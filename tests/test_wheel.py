"""The wheel contains all files of the package, and --help works without JAX."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_installs_and_help_works(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"millrace/cli.py", "millrace/apps/cnn/runs.yml"} <= names
    assert {"millrace/data/digits.npz", "millrace/data/digits.txt"} <= names
    assert {"millrace/drawing/charts.js", "millrace/report/live.js"} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--force-reinstall",
            wheel,
        ],
        check=True,
        capture_output=True,
    )
    result = subprocess.run(
        [tmp_path / "venv" / "bin" / "millrace", "--help"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        # --help needs only pyyaml, which is taken from this environment.
        env={"PYTHONPATH": next(p for p in sys.path if p.endswith("site-packages"))},
    )
    assert "millrace <application> <verb>" in result.stdout
