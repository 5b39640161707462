"""Virtual time to one training loss on 1, 2, 4 and 8 nodes (the paper's Figure 11).

``apps/pgd`` on an emulated fleet, as the paper's workers: the data are split evenly, every node
takes one step on its own (k + r) N / n samples, and the server averages after each. The first pass
over the data and selecting the top take no virtual time. The link changes how long a round lasts
and nothing else, so that each training runs once and a few rounds show what other links make of it.
"""

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero_studies.core.apps import app_modules
from flwr_hetero_studies.tasks import (
    data_shape,
    evaluate,
    initial_arrays,
    load_partition,
    model_from,
)

NODES, LINKS_MBPS = (1, 2, 4, 8), (10_000.0, 1000.0)
SECONDS_PER_EXAMPLE = 1e-4
"""Of the 28x28 CNN on one core of a server."""
GOAL = 0.6
"""The loss that one node has reached at this part of its rounds is the target."""


def curve(
    dataset: str, model: str, seed: int, nodes: int, link_mbps: float, rounds: int, every: int
) -> list[dict[str, float]]:
    """Train, and note virtual time and training loss now and then."""
    app, task = app_modules("pgd", "pgd_app")
    profile = DeviceProfile(
        uplink_mbps=link_mbps, downlink_mbps=link_mbps, seconds_per_example=SECONDS_PER_EXAMPLE
    )
    config = {"dataset": dataset, "partition": "iid", "model": model, "rule": "topk", "seed": seed,
              "step-ratio": 0.02, "learning-rate": 0.1, "local-steps": 1, "look-every": 0,
              "full-pass": True}  # fmt: skip
    settings = task.PGDSettings.from_run_config(config)
    examples, points = load_partition(dataset, 0, 1, seed=seed), []
    strategy = Wrapper(settings.strategy())

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number % every:
            return None
        state = arrays.to_torch_state_dict()
        loss, _ = evaluate(model_from(state, model, *data_shape(dataset)), examples)
        points.append({"round": number, "virtual_s": strategy.fleet.clock.virtual_s, "loss": loss})
        return MetricRecord({"loss": loss})

    strategy.start(
        LocalGrid(app, [profile] * nodes, run_config=config),
        initial_arrays(settings),
        rounds,
        train_config=ConfigRecord({keys.NUM_STEPS: 1}),
        evaluate_fn=measure,
    )
    return points


def measure(dataset: str, model: str, seed: int, rounds: int, every: int) -> list[dict[str, Any]]:
    """Return a row per number of nodes and link."""
    alone: dict[float, float | None] = {}
    goal, rows = 0.0, []
    for nodes in NODES:
        points = curve(dataset, model, seed, nodes, LINKS_MBPS[0], rounds, every)
        if nodes == 1:
            goal = points[round(GOAL * (len(points) - 1))]["loss"]
        took = next((point["round"] for point in points if point["loss"] <= goal), None)
        for link in LINKS_MBPS:
            end = curve(dataset, model, seed, nodes, link, 2, 1)[-1]
            seconds = took and took * end["virtual_s"] / end["round"]
            first = alone.setdefault(link, seconds)
            row = {"link_mbps": link, "nodes": nodes, "virtual_s": seconds, "rounds": took}
            rows.append(row | {"speedup": first / seconds if first and seconds else None})
    return [{"loss": goal, **row} for row in rows]
