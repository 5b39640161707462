"""The same run with random selection, and the page that compares the two."""

from dataclasses import replace
from math import ceil
from pathlib import Path

import torch
from flwr.clientapp import ClientApp

from flwr_hetero.client.device import named_fleet
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.report import read_history
from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import write_page
from flwr_hetero.report.history import HISTORY
from flwr_hetero.strategy import TiFL
from flwr_hetero_studies.tasks.run import run_app
from tifl_app.task import RANDOM, TiflSettings

SHARE = 0.4
"""Rounds of the baseline over those of TiFL, which are several times as short."""


def run_baseline(
    settings: TiflSettings, client_app: ClientApp, num_nodes: int, run_config: dict, out: Path
) -> Path:
    """Run random selection on the same emulated devices, in this process; return its folder.

    A resumed run that had its baseline keeps it.
    """
    done = read_history(out).last_round if (out / HISTORY).is_file() else -1
    num_rounds = ceil(SHARE * settings.num_server_rounds)
    if settings.resume and done >= num_rounds:
        return out
    given = replace(
        settings,
        policy=RANDOM,
        num_server_rounds=num_rounds,
        output_dir=str(out),
        resume=settings.resume and done >= 0,
    )
    with given.as_typed():
        inner = given.inner_strategy()
    strategy = TiFL(inner, given.clients_per_round, 1, policy=RANDOM, seed=given.seed)
    devices = named_fleet(given.fleet, num_nodes)
    grid = LocalGrid(client_app, devices, seed=given.seed, run_config=run_config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small batches: more threads wait for each other
    try:
        return run_app("tifl", given, strategy, grid)
    finally:
        torch.set_num_threads(threads)


def verdict(baseline: Path, run: Path) -> str:
    """Write the page beside the run's report; return its first sentence and its path."""
    compared = compare(read_runs([baseline, run]))
    page = write_page(compared, run / "compare.html")
    return " ".join([*compared.sentences, str(page)])
