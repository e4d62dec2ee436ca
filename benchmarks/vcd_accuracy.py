"""Test log-likelihoods of VCD and its baselines from finished runs, next to the paper.

The runs are

    millrace vcd train -c default --run-dir runs/default
    millrace vcd train -c hoffman --run-dir runs/hoffman
    millrace vcd train -c plain_vae --run-dir runs/plain_vae

and the same with other seeds. Each makes 400,000 updates and ends with 20,000 importance
samples of three proposals for each of the 10,000 test images.

    python vcd_accuracy.py runs/default runs/hoffman runs/plain_vae

Target: every run reaches the log-likelihood of its objective in the paper (Ruiz and Titsias
2019, table 2), rounded down by about a tenth.
"""

import json
from pathlib import Path
from typing import Any

from harness import Result, build_parser, publish

from millrace.config import load_yaml

_PAPER = {"vcd": -95.86, "hoffman": -96.23, "standard_kl": -98.46}
_TARGETS = {"vcd": -95.9, "hoffman": -96.4, "standard_kl": -98.7}


def read_figures(run: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    summary = json.loads((run / "summary.json").read_text())
    if summary["status"] != "completed" or "test_likelihood" not in summary:
        raise SystemExit(f"{run} is not a completed run with a test.")
    config = load_yaml(run / "config.yml")
    # The times in the metrics leave out pauses before a run was resumed.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = max(json.loads(line)["time"] for line in lines)
    return {
        "objective": config["objective"],
        "seed": config["seed"],
        "updates": summary["updates"],
        "minutes": last / 60,
        "likelihood": summary["test_likelihood"],
        "device": summary["device"]["kind"],
        "versions": summary["versions"],
    }


def format_row(run: dict[str, Any]) -> dict[str, str]:
    """Return the row of a run."""
    likelihood = run["likelihood"]
    means = {
        name: f"{likelihood[name]['mean']:.2f}" for name in ("encoder", "hmc_mean", "hmc")
    }
    return {
        "objective": run["objective"],
        "seed": str(run["seed"]),
        "updates": f"{run['updates']:,}",
        "test log-likelihood": f"{likelihood['best']['mean']:.2f}",
        "paper": f"{_PAPER[run['objective']]:.2f}",
        "target": f"{_TARGETS[run['objective']]:.1f}",
        **{f"by {name.replace('_', ' ')}": mean for name, mean in means.items()},
        "minutes": f"{run['minutes']:.1f}",
    }


def main() -> None:
    """Read the runs and report."""
    parser = build_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument(
        "--note", default="", help="remark for the report, such as other load"
    )
    args = parser.parse_args()
    runs = [read_figures(run) for run in args.runs]
    margins = [
        run["likelihood"]["best"]["mean"] - _TARGETS[run["objective"]] for run in runs
    ]
    error = runs[0]["likelihood"]["best"]["standard_error"]
    result = Result(
        name="vcd_accuracy",
        table=[format_row(run) for run in runs],
        ratio_name="nats above the target, lowest of all runs",
        ratio=min(margins),
        target=0.0,
        explanation=(
            "The test log-likelihood is the mean over images of the best of three "
            "estimates, as in the paper; the mean of each is next to it. The standard "
            f"error over images is {error:.2f}, the same images for all rows. "
            f"{args.note}"
        ),
        numbers={"runs": runs},
    )
    versions = ", ".join(f"{n} {v}" for n, v in runs[0]["versions"].items())
    devices = sorted({run["device"] for run in runs})
    publish(result, args, {"device": ", ".join(devices), "versions": versions})


if __name__ == "__main__":
    main()
