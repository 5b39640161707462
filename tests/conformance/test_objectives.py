"""docs/objectives.md: every row of its table is run, and must give what the row says.

The model has a number per node, and node i descends on h_i |x - e_i|^2 / 2, so that the point where
a strategy stays is the list of c_i h_i, with the nodes' shares c_i in its objective.
"""

import heapq
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from quadratics import Watched, fedavg, models
from recording import History

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.asynchronous.engine import Update
from flwr_hetero.asynchronous.strategy import Rule
from flwr_hetero.biased_local_sgd.shared_data import read_samples
from flwr_hetero.exchange.queue import Pending
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.slices.algorithm import Ending
from flwr_hetero_studies import rivals

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
ROW = r"^\| `(.+)` \| `(.+)` \| (\d+) % \| (4|40|400) \|$"
ROWS = re.findall(ROW, PAGE, re.MULTILINE)
OWN = [(code, share, int(most)) for code, share, most, _ in ROWS if "shared_samples" not in code]
SHARED = [(code, int(most)) for code, _, most, _ in ROWS if "shared_samples" in code]
FURTHER = [
    (code, share, int(most), ratio)
    for code, share, most, up_to in ROWS
    for ratio in (40, 400)
    if ratio <= int(up_to)
]
"""Rows at speeds further apart than the 4.4 of ``SPEED``."""

EXAMPLES = np.array([50, 150, 100, 100, 150, 50, 100, 100])
SPEED = np.array([2.0, 1.71, 1.33, 1.13, 0.61, 0.557, 0.503, 0.457])
CURVATURE = np.array([1.2, 0.8, 0.9, 1.3, 0.7, 1.0, 1.1, 1.25])
NODES = len(SPEED)
TIER = np.arange(len(SPEED)) // 2
SETTINGS = {
    "steps": {"fast_steps": 10, "budget": "deadline"},
    "tiers": {"clients_per_round": 2, "num_tiers": 4, "profiling": "phase"},
    "chances": (0.4, 0.3, 0.2, 0.1),
}
"""What the page calls so."""
MERGES, ROUNDS = 240, 5
"""Server updates; rounds of FedSlice, of 30 and more each."""
LONG_BY_DAY = ("FedSlice()",)
"""Rows without rounds that CI runs with messages: the others take minutes together."""
BY_MESSAGES = ("FedSlice", "FedBuff(LocalSteps")
"""How rows begin that need messages, too: their nodes set steps by time."""
FURTHER_BY_DAY = ("FedBuff()", "TiFL(**tiers, policy=chances)")
"""Rows that CI runs at speeds further apart: one without rounds, one with them."""


def build(code):
    """Make the strategy of a row."""
    return eval(
        code, {**vars(ours), **vars(rivals), "FedAvg": lambda: ours.Wrapper(fedavg()), **SETTINGS}
    )


@pytest.fixture(autouse=True)
def _end_of_a_run(request, monkeypatch):
    """Let slices be equal in steps from the start where a row is about the end of a run."""
    if "concurrency=2" in request.node.name:
        monkeypatch.setattr("flwr_hetero.slices.algorithm.ending", lambda *_: Ending(equal=1.0))


@pytest.fixture(autouse=True)
def _fedavg_that_does_not_evaluate(monkeypatch):
    monkeypatch.setattr("flwr_hetero.server.wrapper.FedAvg", fedavg)


def of_tier(values):
    """Sum up over each node's tier."""
    return np.bincount(TIER, values)[TIER]


def over_draws(weights, count):
    """Return each node's mean share in the weighted means of ``count`` nodes drawn."""
    drawn = [np.isin(range(NODES), some) * weights for some in combinations(range(NODES), count)]
    return np.mean([one / one.sum() for one in drawn], axis=0)


def spread(ratio):
    """Return speeds of the same order, the fastest so many times as fast as the slowest."""
    return SPEED ** (np.log(ratio) / np.log(SPEED[0] / SPEED[-1]))


def shares(code, share, strategy, records, speed=SPEED):
    """Return the nodes' shares by a row's expression, in the names that the page gives."""
    p = EXAMPLES / EXAMPLES.sum()
    tiers = [record.get("tifl", {}).get("tier") for record in records]
    names = {"p": p, "q": of_tier(p), "P": np.array(SETTINGS["chances"])[TIER]}
    names |= {"rate": speed, "speed": speed}
    if getattr(strategy, "node_limit", None) and len(records) > NODES:
        sent = [node for record in records[NODES:] for node in record["fedbuff"]["nodes"]]
        names["rate"] = np.array([sent.count(f"node-{i}") for i in range(NODES)])
    names |= {"of_tier": of_tier, "over_draws": over_draws, "quick": np.arange(NODES) < 4}
    if None not in tiers:
        names["rounds"] = np.bincount(tiers, minlength=TIER[-1] + 1)[TIER]
    names["mirror"] = speed[1::2][::-1][TIER]
    if steps := records[-1].get("fedbuff", {}).get("num_steps"):
        names["tau"] = np.array([steps[f"node-{i}"] for i in range(NODES)])
    if hasattr(strategy, "num_steps"):
        names["tau"] = strategy.num_steps([f"node-{i}" for i in range(NODES)])
    values = eval(share, names)
    return values / values.sum()


def run(strategy, rounds, lr, x=None, speed=SPEED):
    """Return the models and the records of a run."""
    history = History(strategy)
    grid = Watched(np.eye(NODES), speed, lr=lr, examples=EXAMPLES.tolist(), curvatures=CURVATURE)
    # the slowest of 400 may still evaluate when its tier is asked again
    grid.strict = speed is SPEED
    start = np.full(NODES, 1 / NODES) if x is None else x
    values, _ = models(history, grid, rounds, x=start)
    return values, history.records[1:]


def chance(strategy, records, t):
    """Return the probability of a round's draw, up to a factor."""
    policy = getattr(strategy, "policy", None)
    if policy is None:
        return 1.0  # all sets of nodes are equally likely
    tier = records[t]["tifl"]["tier"]
    if not isinstance(policy, str):
        return policy[tier]
    return np.mean([record["tifl"]["tier"] == tier for record in records])


def stays_at(strategy, values, records):
    """Solve for the x that the mean over all draws does not move.

    For given nodes a round is a linear map of x, which two such rounds determine.
    """
    rounds_of = {}
    for t in range(len(records) // 4, len(records)):  # steps are measured by then
        rounds_of.setdefault(tuple(sorted(records[t]["weights"])), []).append(t)
    moves = 0.0
    slopes = 0.0
    for rounds in rounds_of.values():
        first = rounds[0]
        last = rounds[-1]
        pulls = [chance(strategy, records, t) * (values[t + 1] - values[t]) for t in (first, last)]
        apart = values[first] - values[last]
        slope = (pulls[0] - pulls[1]) @ apart / (apart @ apart)
        moves = moves + pulls[0] - slope * values[first]
        slopes = slopes + slope
    return -moves / slopes


def stays(strategy, code, share, rounds, speed=SPEED):
    """Return where a strategy that works in rounds stays, and where the row says."""
    values, records = run(strategy, rounds, 1e-4, speed=speed)
    goal = CURVATURE * shares(code, share, strategy, records, speed)
    return stays_at(strategy, values, records), goal / goal.sum()


def own_case(code, share, most):
    """Make a parameter: CI runs rows of rounds, and a few of the long ones."""
    strategy = build(code)
    needs_many_rounds = isinstance(strategy, ours.RandomSelection) or "adaptive" in code
    is_without_rounds = isinstance(strategy, Rule | ours.FedSlice)
    is_long = needs_many_rounds or (is_without_rounds and code not in LONG_BY_DAY)
    marks = [pytest.mark.nightly] if is_long else []
    return pytest.param(code, share, most, id=code, marks=marks)


@pytest.mark.parametrize(("code", "share", "most"), [own_case(*row) for row in OWN])
def test_point_where_a_strategy_stays(code, share, most):
    strategy = build(code)
    if isinstance(strategy, Rule | ours.FedSlice):
        is_in_rounds = isinstance(strategy, ours.FedSlice)
        count = ROUNDS if is_in_rounds else MERGES
        # enough to know all nodes' steps, or their rates
        num_known = count if "rate" in share else count // 12 + 2
        _, records = run(strategy, num_known, 0.0)
        goal = CURVATURE * shares(code, share, strategy, records)
        goal /= goal.sum()
        lr = 2e-4 if is_in_rounds else 6e-4 if "concurrency" in code else 8e-4
        values, _ = run(build(code), count, lr, goal)
        point = values[count // 4 :].mean(axis=0)
    else:
        point, goal = stays(strategy, code, share, rounds_of(strategy))
    assert np.abs(point - goal).sum() <= most / 100, (point.round(4), goal.round(4))


def rounds_of(strategy):
    """Return in how many rounds each set of nodes is drawn twice."""
    if isinstance(strategy, ours.RandomSelection) or getattr(strategy, "policy", "") == "adaptive":
        return 200
    return 60 if isinstance(strategy, ours.TiFL) else 12


def flow(strategy, speed, merges):
    """Return what nodes add to the model by a rule alone, without messages, and their rates."""
    strategy.identity = str
    in_flight = []
    waiting = []
    added = np.zeros(NODES)
    count = np.zeros(NODES)
    version = 0
    now = 0.0
    while version < merges:
        busy = {node for _, node, *_ in in_flight}
        idle = [node for node in range(NODES) if node not in busy]
        for node in strategy.next_nodes(idle, len(busy), waiting):
            heapq.heappush(in_flight, (now + 10 / speed[node], node, now, version))
        now, node, sent_s, started = heapq.heappop(in_flight)
        metadata = SimpleNamespace(dst_node_id=node, message_id=f"{node}, {now}")
        asked = Pending(SimpleNamespace(metadata=metadata), sent_s, 0.0, started)
        waiting.append(Update(asked, None, now))
        if due := strategy.due(waiting, len(in_flight) + 1):
            nodes = [update.pending.node_id for update in due]
            waiting = waiting[len(due) :]
            strategy.begin(due, version)
            shares = strategy.weigh(due, EXAMPLES[nodes].tolist())
            factors = 1 / EXAMPLES[nodes] if shares.factors is None else shares.factors
            weights = factors * EXAMPLES[nodes]
            version += 1
            # rates are known after a quarter
            if version > merges // 4:
                np.add.at(added, nodes, shares.step * shares.scales * weights / weights.sum())
                np.add.at(count, nodes, 1)
    return added, count


def further_case(code, share, most, ratio):
    """Make a parameter: CI runs two rows at 40, and the others run at night."""
    is_long = ratio == 400 or code not in FURTHER_BY_DAY
    marks = [pytest.mark.nightly] if is_long else []
    return pytest.param(code, share, most, ratio, id=f"{code}, {ratio}", marks=marks)


@pytest.mark.parametrize(("code", "share", "most", "ratio"), [further_case(*r) for r in FURTHER])
def test_rows_hold_at_speeds_further_apart(code, share, most, ratio):
    strategy = build(code)
    speed = spread(ratio)
    if code.startswith(BY_MESSAGES):
        # so little that the model stays: what was added is c_i h_i
        is_sliced = isinstance(strategy, ours.FedSlice)
        count = 30 if ratio == 400 else 12 if is_sliced else 6
        count *= 1 if is_sliced else 25
        values, records = run(strategy, count, 1e-7, np.zeros(NODES), speed)
        point = values[-1] - values[count // 4]
        goal = CURVATURE * shares(code, share, strategy, records, speed)
    elif isinstance(strategy, Rule):
        times = 24 if ratio == 40 else 6
        merges = 4000 if "concurrency" in code else int(times * speed.sum() / speed[-1])
        point, rate = flow(strategy, speed, merges)
        # the quickest wait when they have sent half of a buffer
        goal = shares(code, share, strategy, [{}], rate)
    else:
        point, goal = stays(strategy, code, share, rounds_of(strategy), speed)
    point /= point.sum()
    goal = goal / goal.sum()
    assert np.abs(point - goal).sum() <= most / 100, (point.round(4), goal.round(4))


def shared_app(num_samples):
    """Make nodes that descend on the samples they are assigned, |x - e_k|^2 / 2 of sample k."""
    lr = 1e-3
    batch = 4
    app = ClientApp()

    @app.train()
    def train(message, context):
        x = message.content["arrays"]["x"].numpy()
        steps = message.content["config"]["num-steps"]
        record = message.content.config_records.get(keys.SAMPLES)
        chosen = np.arange(steps * batch) if record is None else read_samples(record)[0]
        for samples in chosen.reshape(steps, batch) % num_samples:
            x = x - lr * (x - np.eye(num_samples)[samples].mean(axis=0))
        metrics = {"num-examples": num_samples, "num-steps": steps, "examples-processed": steps}
        content = {"arrays": ArrayRecord({"x": Array(x)}), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


@pytest.mark.parametrize(("code", "most"), SHARED)
def test_samples_of_shared_data_count_alike(code, most):
    strategy = build(code)
    num_samples = 40
    devices = [DeviceProfile(speed, seconds_per_example=1.0) for speed in SPEED]
    start = np.full(num_samples, 1 / num_samples)
    values, _ = models(strategy, LocalGrid(shared_app(num_samples), devices), 150, x=start)
    steps = strategy.num_steps([f"node-{i}" for i in range(NODES)])
    assert steps.max() >= 4 * steps.min()
    assert np.abs(values[30:].mean(axis=0) - start).sum() <= most / 100


def test_page_has_all_rows():
    assert len(OWN) + len(SHARED) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)) > 20
    every = {"FedAvg", "FedSlice", "FedBuff", "TiFL", "LocalSteps", "BiasedLocalSGD"}
    every |= {"FedAT", "FedAsync", "FedCompass", "DeadlineSelection"}
    assert every | {"RandomSelection"} <= set(re.findall(r"\w+(?=\()", str(ROWS)))
