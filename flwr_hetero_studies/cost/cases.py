"""What the server's part costs: selection, TiFL over FedAvg, the weighted mean; scale; memory.

Times are CPU time of one process, and every run is alone. ``scale.py`` has whole rounds of large
fleets, ``memory.py`` the processes of a real SuperNode.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.server.aggregate import mean_arrays
from flwr_hetero.strategy import TiFL
from flwr_hetero.tifl.algorithm import first_state
from flwr_hetero.tifl.tiers import Tiers, quantile_tiers
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import Case, Line
from flwr_hetero_studies.cost import apps, memory, scale
from flwr_hetero_studies.cost.scale import fedavg, figures_of

SETTINGS: dict[str, Any] = {"rounds": 100, "nodes": 1000, "megabytes": 1.0, "repeats": 7}
FAST = {"rounds": 5, "nodes": 20, "megabytes": 0.1, "repeats": 2}
FAST_CASES = ["selection/1,000 *", "overhead/*", "mean/*", "scale/*100 nodes*"]
PER_ROUND = 100
LAYOUTS = {
    "one array": [1.0],
    "ResNet-like": [0.002] * 20 + [0.01] * 12 + [0.06] * 8 + [0.18, 0.18],
    "many small": [1 / 400] * 400,
}
"""Parts of a model's size that each array takes."""


def plan(options: Options, lines: list[Line]) -> Iterator[Trial]:
    """Yield all runs, each alone."""
    set_to = options.settings
    for nodes in (10**3, 10**4, 10**5, 10**6):
        case = {"experiment": "selection", "name": f"{nodes:,} nodes", "nodes": nodes}
        yield Trial(case | {"rounds": 2 * set_to["rounds"]}, alone=True)
    case = {"experiment": "overhead", "name": "TiFL over FedAvg"}
    yield Trial(case | {key: set_to[key] for key in ("nodes", "megabytes", "repeats")}, alone=True)
    for name in LAYOUTS:
        size = {"nodes": 50, "megabytes": 10 * set_to["megabytes"], "repeats": set_to["repeats"]}
        yield Trial({"experiment": "mean", "name": name, **size}, alone=True)
    yield from scale.plan(set_to["rounds"])
    yield from memory.plan(options)
    yield from apps.plan()


def run(case: Case, seed: int, data: Data) -> dict[str, Any]:
    """Measure one case."""
    if case["experiment"] == "memory":
        return {"metrics": memory.run(case, data)}
    own = {"selection": selection, "overhead": overhead, "mean": compare_means}
    own |= {"scale": scale.run, "apps": apps.run}
    return {"metrics": own[case["experiment"]](case)}


# --- selection ------------------------------------------------------------------------------


class Crowd(LocalGrid):
    """A grid that names many nodes, to none of which a message is sent."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(ClientApp(), [DeviceProfile()])
        self.ids = dict.fromkeys(range(num_nodes))

    def get_node_ids(self) -> Iterable[int]:
        """Return all, as a set-like view, as any LocalGrid does."""
        return self.ids.keys()


def profiled(num_nodes: int) -> TiFL:
    """Make a strategy that is where it would be after profiling, without a million messages."""
    strategy = TiFL(fedavg(), PER_ROUND, policy="random", profiling="phase")
    for i in range(num_nodes):
        strategy.fleet.nodes.set_partition_id(i, i)
    latency = np.random.default_rng(0).lognormal(size=num_nodes)
    found, names = quantile_tiers(latency, 5), [f"node-{i}" for i in range(num_nodes)]
    by_name = [dict(zip(names, row.tolist(), strict=True)) for row in (latency, found.tier)]
    # the names of the nodes, as the first reply would tell them
    strategy.tiers = Tiers(*by_name, found.boundaries, found.latency)
    strategy.state = first_state("random", 5, None, 5)
    strategy.timing.set_known(set(range(num_nodes)))
    return strategy


def selection(case: Case) -> dict[str, float]:
    """Time everything up to the finished instructions, FedAvg inside TiFL."""
    grid, strategy = Crowd(case["nodes"]), profiled(case["nodes"])
    arrays, config, times = ArrayRecord([np.zeros(1)]), ConfigRecord(), []
    for number in range(1, case["rounds"] + 1):
        start = time.process_time()
        messages = list(strategy.configure_train(number, arrays, config, grid))
        times.append(1e3 * (time.process_time() - start))
        assert len(messages) == PER_ROUND
    figures = {"mean_ms": float(np.mean(times)), "median_ms": float(np.median(times))}
    return figures | {"most_ms": max(times)}


# --- TiFL over FedAvg -----------------------------------------------------------------------


def echo_app(megabytes: float) -> ClientApp:
    """Make nodes that answer with arrays of the right size, a copy for each reply."""
    app = ClientApp()
    # drawn once: replies differ in nothing that counts
    model = np.random.default_rng(0).standard_normal(round(megabytes * 250_000), np.float32)

    def reply(message: Message, records: dict[str, ArrayRecord]) -> Message:
        content = RecordDict({**records, "metrics": MetricRecord({keys.NUM_EXAMPLES: 100})})
        return Message(content, reply_to=message)

    app.train()(
        lambda message, context: reply(message, {"arrays": ArrayRecord({"0": Array(model)})})
    )
    app.train("profile")(lambda message, context: reply(message, {}))
    return app


def time_round(strategy: Strategy, grid: LocalGrid, arrays: ArrayRecord) -> tuple[float, float]:
    """Return the seconds that a round took in the strategy, and in all."""
    times = [time.process_time()]
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    times.append(time.process_time())
    replies = list(grid.send_and_receive(messages))
    times.append(time.process_time())
    new, _ = strategy.aggregate_train(1, replies)
    times.append(time.process_time())
    assert new is not None
    return times[1] - times[0] + times[3] - times[2], times[3] - times[0]


def overhead(case: Case) -> dict[str, Any]:
    """Time FedAvg alone and FedAvg inside TiFL in turns, on the same nodes."""
    grid = LocalGrid(echo_app(case["megabytes"]), [DeviceProfile()] * case["nodes"])
    arrays = ArrayRecord({"0": Array(np.zeros(round(case["megabytes"] * 250_000), np.float32))})
    tifl = TiFL(fedavg(), case["nodes"], policy="vanilla", profiling="phase")
    both = (fedavg(), tifl)
    # warms up; TiFL also profiles
    for strategy in both:
        time_round(strategy, grid, arrays)
    turns = [[time_round(one, grid, arrays) for one in both] for _ in range(case["repeats"])]
    # (repeats, FedAvg or TiFL, strategy or whole round)
    times = np.array(turns)
    medians = np.median(times, axis=0).tolist()
    ratios = figures_of("overhead", times[:, 1] / times[:, 0] - 1)
    return {"fedavg_s": medians[0], "tifl_s": medians[1], **ratios}


# --- weighted mean --------------------------------------------------------------------------


def make_models(case: Case) -> tuple[list[RecordDict], list[float]]:
    """Make float32 models with one integer buffer each, and steps as weights."""
    rng, parts = np.random.default_rng(0), LAYOUTS[case["name"]]
    sizes = [max(1, round(case["megabytes"] * 1e6 / 4 * part / sum(parts))) for part in parts]
    weights = rng.integers(1, 33, case["nodes"]).astype(float).tolist()
    contents = []
    for weight in weights:
        arrays = {f"layer{i}": rng.standard_normal(n, np.float32) for i, n in enumerate(sizes)}
        arrays["num_batches_tracked"] = np.array(int(weight))
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        contents.append(RecordDict({"arrays": record, "metrics": MetricRecord({"w": weight})}))
    return contents, weights


def extra_bytes(call: Callable[[], object]) -> int:
    """Return the peak of memory taken during a call, its result included."""
    # peak, not sum: a mean in place makes no copy of each model
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def compare_means(case: Case) -> dict[str, Any]:
    """Time Flower's ``aggregate_arrayrecords`` and ours in turns on the same records."""
    contents, weights = make_models(case)
    records = [content["arrays"] for content in contents]

    def flower() -> ArrayRecord:
        return aggregate_arrayrecords(contents, "w")

    def ours() -> ArrayRecord:
        return mean_arrays(records, weights, like=records[0])

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    # also warms up
    theirs, mine = flower(), ours()
    times = np.array([(seconds(flower), seconds(ours)) for _ in range(case["repeats"])])
    layers = [name for name in theirs if name.startswith("layer")]
    differences = [np.abs(theirs[name].numpy() - mine[name].numpy()).max() for name in layers]
    medians = np.median(times, axis=0).tolist()
    return figures_of("speedup", times[:, 0] / times[:, 1]) | {
        "flower_s": medians[0],
        "ours_s": medians[1],
        "flower_extra_bytes": extra_bytes(flower),
        "ours_extra_bytes": extra_bytes(ours),
        "largest_difference": float(max(differences)),
        "flower_integers": theirs["num_batches_tracked"].dtype,
        "our_integers": mine["num_batches_tracked"].dtype,
    }
