"""The paper's table: test log-likelihoods of VCD and its baselines, from finished runs.

The runs are those of

    millrace vcd train -c default --run-dir runs/default
    millrace vcd train -c hoffman --run-dir runs/hoffman
    millrace vcd train -c plain_vae --run-dir runs/plain_vae

and of as many other seeds as there are. Each takes 400,000 updates and ends with 20,000
importance samples of three proposals for each of the 10,000 test pictures.

    python vcd_accuracy.py runs/default runs/hoffman runs/plain_vae

Target: every run at least at what the paper's objective of that name reached, rounded down
to a tenth or so (Ruiz and Titsias 2019, table 2).
"""

import json
from pathlib import Path
from typing import Any

from reporting import Result, parser, publish

from millrace.config import load_yaml

_PAPER = {"vcd": -95.86, "hoffman": -96.23, "standard_kl": -98.46}
_TARGETS = {"vcd": -95.9, "hoffman": -96.4, "standard_kl": -98.7}


def read(run: Path) -> dict[str, Any]:
    """Return what there is to say of a run."""
    summary = json.loads((run / "summary.json").read_text())
    if summary["status"] != "completed" or "test_likelihood" not in summary:
        raise SystemExit(f"{run} is not the run directory of a completed, tested run.")
    config = load_yaml(run / "config.yml")
    # A run that was resumed has its time in the metrics, the pauses left out.
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


def row(run: dict[str, Any]) -> dict[str, str]:
    """Return a run's line of the table."""
    found = run["likelihood"]
    means = {name: f"{found[name]['mean']:.2f}" for name in ("encoder", "hmc_mean", "hmc")}
    return {
        "objective": run["objective"],
        "seed": str(run["seed"]),
        "updates": f"{run['updates']:,}",
        "test log-likelihood": f"{found['best']['mean']:.2f}",
        "the paper's": f"{_PAPER[run['objective']]:.2f}",
        "target": f"{_TARGETS[run['objective']]:.1f}",
        **{f"by {name.replace('_', ' ')}": mean for name, mean in means.items()},
        "minutes": f"{run['minutes']:.1f}",
    }


def main() -> None:
    """Make the table."""
    options = parser(__doc__)
    options.add_argument("runs", nargs="+", type=Path, help="run directories")
    options.add_argument("--note", default="", help="what else to say, such as other load")
    args = options.parse_args()
    runs = [read(run) for run in args.runs]
    margins = [
        run["likelihood"]["best"]["mean"] - _TARGETS[run["objective"]] for run in runs
    ]
    error = runs[0]["likelihood"]["best"]["standard_error"]
    result = Result(
        name="vcd_accuracy",
        table=[row(run) for run in runs],
        ratio_name="nats above the target, the least of all runs",
        ratio=min(margins),
        target=0.0,
        explanation=(
            "The test log-likelihood is the mean over pictures of the best of three "
            "estimates, as in the paper; beside it is each one's own mean. The pictures "
            f"themselves make it uncertain by {error:.2f}, which all rows share. "
            f"{args.note}"
        ),
        numbers={"runs": runs},
    )
    versions = ", ".join(f"{n} {v}" for n, v in runs[0]["versions"].items())
    devices = sorted({run["device"] for run in runs})
    publish(result, args, {"device": ", ".join(devices), "versions": versions})


if __name__ == "__main__":
    main()
