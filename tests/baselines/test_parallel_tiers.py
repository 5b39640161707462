"""Tiers side by side on the virtual clock, and whose objective their merges optimise."""

from collections import Counter

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg
from quadratics import STEPS, Watched, answers, fedavg, models, start
from recording import Folder, History

from flwr_hetero.fleet import DeviceProfile, Fault
from flwr_hetero.strategy import LocalSteps, ParallelTiFL, Recorded

SPEEDS = [s * (1 + 0.01 * i) for s in (4.0, 2.0, 1.0) for i in range(3)]  # three tiers
GOALS = np.array([0.0] * 5 + [1.0] * 4)
EXAMPLES = [50, 150, 100, 100, 50, 150, 50, 100, 150]


def run(merges, strategy=None, speeds=SPEEDS, make=Watched, **settings):
    """Run two of three nodes a tier; return the merges' records and the grid."""
    history = History(strategy or ParallelTiFL(fedavg(), 2, 3))
    more = {key: settings.pop(key) for key in ("timeout",) if key in settings}
    grid = make([1.0] * len(speeds), speeds, lr=0.01, **settings)
    models(history, grid, merges, **more)
    return history.records[1:], grid


def tier_of(node):
    return int(node.removeprefix("node-")) // 3


def seconds(records, tier):
    return np.diff([r["virtual_s"] for r in records if r["tifl"]["tier"] == tier])


def test_each_tier_merges_at_its_own_pace():
    records, grid = run(150)
    # all start once; the two quickest of a tier are merged at once, its third goes along later
    assert sorted(node for at_s, node, _, _ in grid.sent if not at_s) == list(range(9))
    counts = Counter(record["tifl"]["tier"] for record in records)
    assert counts.pop(None) <= 4
    assert [counts[tier] / counts[2] for tier in (0, 1)] == pytest.approx([4, 2], rel=0.1)
    later = records[20:]
    for tier, speed in enumerate((4.0, 2.0, 1.0)):  # the slower of two nodes, 1 or 2 % faster
        assert seconds(later, tier) == pytest.approx(STEPS / speed, rel=0.02)
    for record in later:
        assert len(record["selected"]) == 2
        assert {tier_of(node) for node in record["selected"]} == {record["tifl"]["tier"]}


def test_no_more_than_a_cohort_of_each_tier_is_at_work():
    _, grid = run(60, jitter=0.3)
    at_work, most = set(), 0
    events = [(at_s, 1, node) for at_s, node, _, _ in grid.sent]
    for at_s, is_start, node in sorted(events + [(at_s, 0, n) for at_s, n in grid.received]):
        at_work ^= {node}
        assert (node in at_work) == bool(is_start)  # nothing busy is asked
        if at_s > 20:
            most = max(most, len(at_work))
    assert most == 6


def test_tiers_are_formed_of_the_first_replies_and_again():
    records, _ = run(30)
    told = [r["tifl"]["tiers"] for r in records if "tiers" in r["tifl"]]
    assert sorted(told[0]) == ["node-0", "node-1", "node-2"][-len(told[0]) :]
    assert told[-1] == {f"node-{i}": i // 3 for i in range(9)}

    class Slower(Watched):
        def push_messages(self, messages):
            if self.virtual_time_s > 30:  # node 0 slows down
                self._nodes[1000].profile = DeviceProfile(0.5, seconds_per_example=1.0)
            return super().push_messages(messages)

    history = History(ParallelTiFL(fedavg(), 2, 3))
    models(history, Slower([1.0] * 9, SPEEDS, lr=0.01), 80)
    last = [r["tifl"]["tiers"] for r in history.records if "tiers" in r.get("tifl", {})][-1]
    assert last["node-0"] == 2


def goal(weights):
    return float(weights @ GOALS / weights.sum())


@pytest.mark.parametrize(
    ("inner", "merges", "settings", "rel"),
    [
        (fedavg, 250, {"max_weight": 99.0}, 0.04),  # nodes are drawn seldom: idle times are learnt
        (lambda: LocalSteps(fedavg(), 10, budget="slice", weighting="normalised"), 150, {}, 0.02),
    ],
    ids=["whole epochs", "slices"],
)
def test_every_nodes_data_count_by_its_examples(inner, merges, settings, rel):
    x0 = goal(np.array(EXAMPLES))
    grid = Watched(GOALS, SPEEDS, lr=8e-4, examples=EXAMPLES)
    found, _ = models(ParallelTiFL(inner(), 2, 3, **settings), grid, merges, x=x0)
    assert found[merges // 3 :].mean() == pytest.approx(x0, rel=rel)
    grid = Watched(GOALS, SPEEDS, lr=8e-4, examples=EXAMPLES)
    strategy = ParallelTiFL(fedavg(), 2, 3, weighting="examples", staleness="none")
    found, _ = models(strategy, grid, merges, x=x0)
    assert found[-1] < 0.93 * x0  # else the quick count more


def test_a_tier_of_low_accuracy_counts_more():
    """Losses 0.06 and 0.56: factors 2/3 and 4/3 of shares 3/4 and 1/4 balance at 0.4."""
    speeds, goals, examples = SPEEDS[:6], [0.0] * 3 + [1.0] * 3, [150] * 3 + [50] * 3
    found = {}
    for evaluates in (0.0, 1.0):
        strategy = History(ParallelTiFL(FedAvg(fraction_evaluate=evaluates), 3, 2))
        grid = Watched(goals, speeds, lr=0.004, examples=examples)
        found[evaluates] = models(strategy, grid, 300, x=0.25)[0][100:].mean()
    assert found == {0.0: pytest.approx(0.25, rel=0.03), 1.0: pytest.approx(0.4, rel=0.05)}
    quick, slow = strategy.records[-1]["tifl"]["tier_accuracy"]
    assert slow < quick < 0  # minus the loss


@pytest.mark.parametrize("credits", [1, 3])
def test_credits_bound_the_lead_of_the_quick(credits):
    records, _ = run(90, ParallelTiFL(fedavg(), 2, 3, credits=credits))
    counts = np.zeros(3)
    for record in records:
        tier = record["tifl"]["tier"]
        counts += np.arange(3) == (3 if tier is None else tier)
        assert counts.max() - counts.min() <= 2 * credits
        assert min(record["tifl"]["credits"]) >= 0
    assert counts.min() > 25


def test_dead_node_costs_its_cohort_the_time_out_and_the_others_nothing():
    class Dies(Watched):
        def push_messages(self, messages):
            never = [i for i, (_, reply) in self.traffic.pending.items() if not answers(reply)]
            self.at_work = {i: n for i, n in self.at_work.items() if i not in never}
            return super().push_messages(messages)

    dies = [Fault(1, "dies", first_round=20, last_round=45)]
    records, grid = run(150, make=Dies, faults=dies, timeout=40.0)
    failed = [r for r in records if r["failures"]]
    assert {f["node"] for r in failed for f in r["failures"]} == {"node-1"}
    # its cohort is merged with one node less when the time-out is over
    first = failed[0]
    assert first["tifl"]["tier"] == 0
    assert len(first["selected"]) == 1
    waited_s = seconds(records[15:], 0)
    assert waited_s.max() == pytest.approx(40, rel=0.01)
    assert (waited_s > 3).sum() == 1  # then it is left alone
    for tier, speed in ((1, 2.0), (2, 1.0)):
        assert seconds(records[20:], tier) == pytest.approx(STEPS / speed, rel=0.02)
    assert grid.sent[-1][0] > 100


def test_cohort_that_failed_as_a_whole_gets_its_credit_back():
    dead = [Fault(i, "errs", first_round=12, last_round=30) for i in (6, 7, 8)]
    records, _ = run(100, ParallelTiFL(fedavg(), 2, 3, credits=2), faults=dead)
    assert any(record["failures"] for record in records)
    counts = Counter(record["tifl"]["tier"] for record in records)
    assert counts[2] > 10
    assert all(min(record["tifl"]["credits"]) >= 0 for record in records)


def test_node_that_joins_starts_once_and_gets_a_tier():
    class Late(Watched):
        def push_messages(self, messages):
            if self.virtual_time_s > 30 and len(self._nodes) == 9:
                self.join(DeviceProfile(2.01, seconds_per_example=1.0))
            return super().push_messages(messages)

    history = History(ParallelTiFL(fedavg(), 2, 3))
    models(history, Late([1.0] * 10, SPEEDS, lr=0.01), 60)
    merges = [r for r in history.records[1:] if "node-9" in r["selected"]]
    assert merges[0]["virtual_s"] > 30
    assert len(merges) > 3
    assert all(r["tifl"]["tier"] == 1 for r in merges[1:])


def test_resumed_run_goes_on_with_its_tiers(tmp_path):
    def go(merges, resume):
        strategy = ParallelTiFL(fedavg(), 2, 3)
        whole = Recorded(strategy, run_dir=Folder(tmp_path), resume=resume)
        grid = Watched([1.0] * 9, SPEEDS, lr=0.01)
        found = whole.start(grid, start(), merges)
        return strategy, grid, found

    before, _, _ = go(25, resume=False)
    latency = dict(before.latency)
    assert len(latency) == 9
    after, grid, found = go(35, resume=True)
    began_s = max(at_s for at_s, *_ in grid.sent[:15])  # all were asked who they are before
    first = [node for at_s, node, _, number in grid.sent if number == 26 and at_s == began_s]
    assert Counter(node // 3 for node in first) == {0: 2, 1: 2, 2: 2}  # none begins anew
    assert after.latency == pytest.approx(latency, rel=1e-6)
    assert found.arrays["x"].numpy()[0] > 0.5


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clients_per_round": 0}, "clients_per_round must be a whole number of at least 1"),
        ({"num_tiers": 0}, "num_tiers must be a whole number of at least 1"),
        ({"credits": 0}, "credits must be a whole number of at least 1"),
        ({"credits": "paced"}, "credits must be a whole number"),
        ({"max_weight": 0.5}, "max_weight must be"),
        ({"strategy": ParallelTiFL()}, "leave .*selection.* to ParallelTiFL"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        ParallelTiFL(**settings)


def test_cohorts_under_way_are_saved_with_their_credit():
    strategy = ParallelTiFL(fedavg(), 2, 3, credits=4)
    run(20, strategy)
    left = strategy.state_dict()["credits_left"]
    assert left.tolist() > strategy.credits_left.tolist()
    assert left.sum() == strategy.credits_left.sum() + 2  # a third was merged last


def test_damaged_state_is_refused():
    state = ParallelTiFL().state_dict()
    with pytest.raises(ValueError, match="state of ParallelTiFL must hold latency"):
        ParallelTiFL().load_state_dict(state | {"latency": 3})
