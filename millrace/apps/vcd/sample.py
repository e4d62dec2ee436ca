"""``millrace vcd sample``: pictures of what a trained model has learned."""

from millrace.apps.vcd.config.commands import SampleConfig
from millrace.apps.vcd.devices import chosen_devices
from millrace.apps.vcd.images import FOLDER, grids, save_grids
from millrace.apps.vcd.program import hmc_of
from millrace.apps.vcd.trained import load_trained
from millrace.plan import Plan
from millrace.run.run import Run


def sample(config: SampleConfig, run: Run) -> None:
    """Draw grids of samples, reconstructions and chains into the run directory."""
    with chosen_devices(config) as devices:
        trained = load_trained(config)
        run.describe(
            devices[:1],
            Plan(),
            None,
            model=f"{trained.path}, {trained.update} updates",
            dataset=trained.description,
        )
        made = grids(
            trained.params,
            trained.pictures,
            num_rows=config.num_rows,
            num_columns=config.num_columns,
            hmc=hmc_of(trained.config)._replace(
                num_burn_in_steps=0, num_steps=config.num_steps
            ),
            step_size=trained.step_size,
            seed=config.seed,
        )
    for path in save_grids(made, run.directory.path / FOLDER, trained.update):
        run.closing_notes[path.stem] = str(path)
    run.summary["updates"] = trained.update
    run.summary["status"] = "completed"
