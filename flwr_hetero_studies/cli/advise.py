"""The command ``advise``: rank settings on the user's own fleet, emulated."""

import argparse
from math import isfinite
from textwrap import indent
from typing import TYPE_CHECKING, Any

from flwr_hetero.cli.parsing import add_command, end_of_help, tracked
from flwr_hetero.errors import check_count

if TYPE_CHECKING:
    from flwr_hetero_studies.advise.advice import Advice
    from flwr_hetero_studies.advise.candidates import Candidate

MOD = """  from flwr_hetero.mod import hetero
  app = ClientApp(mods=[hetero])"""
NODE = f"""{MOD}
  for batch in hetero.batches(loader, msg):  # your loop over the loader"""

LEGEND = """
faster    how many times as fast as {base} it reached {base}'s accuracy, with the range of its runs
bytes     sent until then, and device-s the time of all devices, as multiples of {base}'s
slow      accuracy on the data of the slowest fifth of the nodes"""
OPTIMIZER = "of your nodes; momentum is 0.9 (default: sgd)"
BASE = "your strategy of Flower, which all settings are put around (default: fedavg)"
ONE_RUN = "A setting with one run is ranked by that run alone: another seed may change its place."


def add(commands: Any) -> None:
    text = "emulate a fleet for a minute and rank the strategies on it"
    end = end_of_help("advise paper-5 --nodes 20 --model-mb 4", "docs/which-method.md")
    parser = add_command(commands, "advise", _advise, text, end)
    kinds = "TOML file of devices, name of a fleet, run directory or its history.jsonl"
    parser.add_argument("fleet", metavar="HISTORY|FLEET.toml", help=kinds)
    add = parser.add_argument
    add("--nodes", type=int, default=20, help="nodes of a fleet from a file (default: 20)")
    add("--clients-per-round", type=int, help="FedAvg's (default: 15 %% of the nodes)")
    add("--examples", type=int, default=256, help="of a usual node (default: 256)")
    add("--batch-size", type=int, default=16, help="of your app (default: 16)")
    add("--model-mb", type=float, default=1.0, help="size of your model (default: 1)")
    costs = (
        "what runs the nodes: Flower's own, warm ones, or none that costs time (default: flower)"
    )
    add("--node", choices=("flower", "warm", "none"), default="flower", help=costs)
    add("--optimizer", choices=("sgd", "momentum", "adam"), default="sgd", help=OPTIMIZER)
    add("--base", choices=("fedavg", "fedavgm", "fedadam"), default="fedavg", help=BASE)
    time = "about how long it takes on two cores; fewer, and it is less sure (default: 60)"
    add("--seconds", type=float, default=60.0, help=time)
    add("--seed", type=int, default=0, help="of the first run (default: 0)")


def _advise(options: argparse.Namespace) -> None:
    from flwr_hetero_studies.advise.advice import advise

    check_count("--nodes", options.nodes, 1)
    names = ("nodes", "clients_per_round", "examples", "batch_size", "model_mb", "node",
             "optimizer", "base", "seconds", "seed")  # fmt: skip
    given = {name: getattr(options, name) for name in names}
    _print(advise(options.fleet, track=tracked, **given))


def _print(advice: "Advice") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from flwr_hetero.client.device import message_time_s
    from flwr_hetero_studies.advise.advice import UNKNOWN

    console = Console()
    costs_s = [message_time_s(device) for device in advice.devices]
    base = advice.base
    head = f"{len(advice.devices)} nodes, {advice.clients_per_round} a round in {base}"
    head += f", {min(costs_s):.2g} to {max(costs_s):.2g} s a message besides its work"
    print(f"{head}\n{LEGEND.format(base=base)}")
    for task, rows in advice.rows.items():
        title = f"\nData: {task}"
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        table.add_column("setting")
        for name in ("faster", "range", "runs", "bytes", "device-s", "slow"):
            table.add_column(name, justify="right")
        for row in rows.values():
            # The guess for a setting that never got there would look like a result.
            lost = row.seeds - row.reached
            speed = f"never in {lost}" if lost else f"{row.speedup:.1f}x"
            span = "" if lost or row.seeds == 1 else f"{row.least:.1f} to {row.most:.1f}"
            costs = [f"{x:.2f}" if isfinite(x) else "" for x in (row.bytes, row.device_s)]
            tail = (str(row.seeds), *costs, f"{100 * row.slow:.0f} %")
            table.add_row(row.candidate.name, speed, span, *tail)
        console.print(table)
    if any(row.seeds == 1 for rows in advice.rows.values() for row in rows.values()):
        print(ONE_RUN)
    _print_lines(advice, advice.best)
    _print_fair(advice)
    console.print(UNKNOWN, highlight=False)


def _print_lines(advice: "Advice", choice: "Candidate") -> None:
    from flwr_hetero.strategy import BiasedLocalSGD, Compressed, FedSlice

    print(f"Take {choice.name}. In your ServerApp:")
    print(indent(choice.python(advice.fast_steps), "  "))
    if choice.has(FedSlice, BiasedLocalSGD):
        print(f"In your ClientApp, which takes the steps that the server asks for:\n{NODE}")
    elif choice.has(Compressed):
        print(f"In your ClientApp, which reads and writes compressed models:\n{MOD}")


def _print_fair(advice: "Advice") -> None:
    best = advice.best
    fair = advice.fair
    task = advice.unfair_in(best.name)
    if task is None:
        return
    own, base = (100 * advice.rows_of(name)[task].slow for name in (best.name, advice.base))
    text = f"On the data of the slowest nodes {best.name} has {own:.0f} % at the target"
    print(f"{text}, {advice.base} {base:.0f} % ({task}).")
    if fair is not None and fair.name != advice.base:
        print("Where these data count:")
        _print_lines(advice, fair)
