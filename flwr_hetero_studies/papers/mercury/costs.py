"""What scoring in the background costs: handing samples over, whole real rounds."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from flwr_hetero.fleet import RealFleet, named_fleet
from flwr_hetero.mercury.background import SCORES, collect_scores, start_scoring
from flwr_hetero_studies.core.apps import APPS
from flwr_hetero_studies.core.plan import Options, Trial
from flwr_hetero_studies.core.record import Case
from flwr_hetero_studies.faults.fleet_run import FleetRun, durations
from flwr_hetero_studies.tasks import make_model

BATCH = 32
EXPERIMENTS = ("handover", "overlap")


def plan(options: Options) -> Iterator[Trial]:
    """Yield all runs; each is alone, for it measures time."""
    for samples in (500, 2000):
        case = {"experiment": "handover", "name": f"{samples} samples", "samples": samples}
        yield Trial(case | {"repeats": 1 if options.fast else 5}, alone=True)
    case = {"experiment": "overlap", "name": "two SuperNodes", "mbps": 4.0, "rounds": 12}
    yield Trial(case | {"repeats": 2}, alone=True)


def run(case: Case) -> dict[str, Any]:
    kind = {"handover": handover, "overlap": overlap}
    return {"metrics": kind[case["experiment"]](case)}


def training_step(model: torch.nn.Module, inputs: Any, targets: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs[:BATCH]), targets[:BATCH]).backward()
        optimizer.step()

    return step


def images(count: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Make the 28x28 CNN and random data for it."""
    model = make_model("cnn", (1, 28, 28), 10)
    return model, torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))


def handover(case: Case) -> dict[str, float]:
    """Measure what scoring in the background adds to a node's own part of a round.

    The scoring itself goes on in a detached process of the lowest priority and is not counted.
    """
    turns = [one_handover(case["samples"]) for _ in range(case["repeats"])]
    added = [handed + collected for _, handed, collected in turns]
    columns = zip(
        ("training_s", "handing_over_s", "collecting_s"), zip(*turns, strict=True), strict=True
    )
    figures = {name: statistics.median(column) for name, column in columns}
    figures |= {"added_s": statistics.median(added), "lowest_s": min(added)}
    return {k: round(v, 4) for k, v in (figures | {"highest_s": max(added)}).items()}


def one_handover(samples: int, steps: int = 20, patience_s: float = 120) -> tuple[float, ...]:
    """Return seconds of training, of handing over and of collecting."""
    model, inputs, targets = images(samples)
    train, start_s = training_step(model, inputs, targets), time.perf_counter()
    for _ in range(steps):
        train()
    trained_s = time.perf_counter()
    folder = start_scoring(model, inputs, targets, limit_s=patience_s)
    started_s = time.perf_counter()
    scores = Path(folder) / SCORES
    while not (scores.exists() and scores.stat().st_size == 8 * samples):
        if time.perf_counter() - started_s > patience_s:
            raise TimeoutError("the worker did not score in time")
        time.sleep(0.1)
    waited_s = time.perf_counter()
    if len(collect_scores(folder).scores) != samples:
        raise RuntimeError("the worker did not score all samples")
    return trained_s - start_s, started_s - trained_s, time.perf_counter() - waited_s


def overlap(case: Case) -> dict[str, Any]:
    """Run ``apps/mercury`` on two real SuperNodes behind slow links, without and with scoring."""
    mbps = case["mbps"]
    runs: dict[str, list[list[dict[str, Any]]]] = {"free": [], "bacc": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        devices = folder / "devices.toml"
        devices.write_text(f"[[device]]\nuplink-mbps = {mbps}\ndownlink-mbps = {mbps}\n")
        fleet = RealFleet(folder / "fleet")
        fleet.up(named_fleet(str(devices), 2))
        try:
            for repeat in range(case["repeats"]):
                for sampling, found in runs.items():
                    out = folder / f"{repeat}-{sampling}"
                    found.append(real_run(fleet, out, sampling, case["rounds"]))
        finally:
            fleet.down()
    left = list(Path(tempfile.gettempdir()).glob("flwr-hetero-scoring-*"))
    figures = {sampling: pooled(found) for sampling, found in runs.items()}
    ratio = figures["bacc"]["median_s"] / figures["free"]["median_s"]
    return {"ratio": round(ratio, 4), "leftovers": len(left), **figures}


def real_run(fleet: RealFleet, out: Path, sampling: str, rounds: int) -> list[dict[str, Any]]:
    settings = {"sampling": sampling, "local_steps": 20, "partition": "iid"}
    run = FleetRun(fleet, out, APPS / "mercury", num_server_rounds=rounds, **settings)
    history = run.start().finish(timeout_s=120.0 * (rounds + 2))
    if not history or history[-1]["round"] != rounds:
        raise RuntimeError(run.tail())
    return history


def pooled(histories: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Put the rounds of several runs together, the first of each left out."""
    times = [durations(history) for history in histories]
    rounds_s = [round(s, 3) for each in times for number, s in sorted(each.items()) if number > 1]
    return {
        "median_s": round(statistics.median(rounds_s), 3),
        "failures": sum(len(record["failures"]) for history in histories for record in history),
        "mean_age": histories[-1][-1]["sampler"].get("mean-age"),
        "rounds_s": rounds_s,
    }
