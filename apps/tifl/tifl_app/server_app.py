"""Build the strategy from the run-config and run it."""

from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from flwr_hetero.client.device import REAL
from flwr_hetero.report import RunDirectory
from flwr_hetero.server.nodes import is_simulated, settled_nodes
from flwr_hetero.strategy import TiFL
from flwr_hetero_studies.tasks.run import run_app
from tifl_app.client_app import app as client_app
from tifl_app.task import RANDOM, TiflSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run TiFL."""
    settings = TiflSettings.from_run_config(context.run_config)
    num_nodes = len(settled_nodes(grid, settings.num_tiers))
    num_tiers = tiers_for(settings.num_tiers, num_nodes, is_simulated(grid))
    if (wanted := settings.clients_per_round) > num_nodes:
        log(WARNING, "clients-per-round is %d, of %d nodes: all train.", wanted, num_nodes)
    with settings.as_typed():
        strategy = TiFL(
            settings.inner_strategy(),
            settings.clients_per_round,
            num_tiers,
            policy=settings.policy,
            interval=settings.interval,
            credits=settings.tier_credits,
            **phase(settings.sync_rounds, is_simulated(grid)),
            seed=settings.seed,
        )
    if not wants_baseline(settings, grid):
        run_app("tifl", settings, strategy, grid)
        return
    from tifl_app.baseline import run_baseline, verdict

    settings = replace(settings, output_dir=str(settings.run_directory("tifl")))
    out = Path(settings.output_dir)
    log(INFO, "First the baseline: random selection, same seed, in this process.")
    config = dict(context.run_config)
    # refuses a folder before any training
    RunDirectory(out, resume=settings.resume, argument="output-dir").close()
    baseline = run_baseline(settings, client_app, num_nodes, config, out / "baseline")
    log(INFO, "Now TiFL, policy %s.", settings.policy)
    run_app("tifl", settings, strategy, grid)
    log(INFO, "%s", verdict(baseline, out))


def wants_baseline(settings: TiflSettings, grid: Grid) -> bool:
    """Leave the baseline out where it would be the run itself, or cost real devices' time."""
    if not settings.baseline or settings.policy == RANDOM:
        return False
    if is_simulated(grid) and settings.fleet != REAL:
        return True
    log(INFO, "No baseline on real devices: run policy='vanilla' and compare the two.")
    return False


def phase(sync_rounds: int, simulated: bool) -> dict[str, Any]:
    """Return what the paper's profiling phase takes, if it is wanted."""
    warmup_rounds = 0 if simulated else 1  # an emulated device has no cold start
    phase = {"profiling": "phase", "sync_rounds": sync_rounds, "warmup_rounds": warmup_rounds}
    return phase if sync_rounds else {}


def tiers_for(num_tiers: int, num_nodes: int, simulated: bool) -> int:
    """Take fewer tiers than asked for on a fleet that is too small for them, and say so."""
    if num_nodes >= num_tiers:
        return num_tiers
    log(WARNING, "%d nodes are too few for %d tiers: %d instead.", num_nodes, num_tiers, num_nodes)
    if simulated:
        more = "num-supernodes=20 client-resources-num-cpus=1"
        log(WARNING, 'Start more with --federation-config "%s"', more)
    return num_nodes
