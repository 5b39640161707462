"""The engine on the virtual clock, by hand and against a naive twin of the paper's rule."""

import numpy as np
import pytest
from oracles.fedbuff import fedbuff
from quadratics import STEPS, Watched, fedavg, models, start
from recording import History

from flwr_hetero.strategy import FedBuff

GOALS = [1.0, -2.0, 3.0, 0.5, 8.0]
SPEEDS = [5.0, 3.17, 1.31, 0.713, 0.1107]  # no two replies come together
LR = 0.03


def paper(**settings):
    """Return the paper's rule, in which a quick node may fill a buffer."""
    strategy = FedBuff(fedavg(), weighting="equal", **settings)
    strategy.node_limit = None
    return History(strategy)


@pytest.mark.parametrize(("concurrency", "size"), [(5, 4), (3, 3), (1, 2)])
def test_the_papers_rule_equals_its_naive_twin(concurrency, size):
    grid = Watched(GOALS, SPEEDS, lr=LR)
    strategy = paper(concurrency=concurrency, buffer_size=size)
    # the paper's has none
    strategy.update_limit = None
    found, _ = models(strategy, grid, 30, x=0.3)
    expected, added = fedbuff(
        0.3,
        lambda node, x: GOALS[node] + (1 - LR) ** STEPS * (x - GOALS[node]),
        [STEPS / speed for speed in SPEEDS],
        [node for _, node, _, _ in grid.sent],
        concurrency,
        size,
        30,
    )
    assert found == pytest.approx(expected, rel=1e-12)
    ours = [record["fedbuff"] for record in strategy.records[1:]]
    names = [[(f"node-{node}", s) for node, s in update] for update in added]
    assert [list(zip(o["nodes"], o["staleness"], strict=True)) for o in ours] == names
    assert max(s for update in added for _, s in update) > (2 if concurrency > 1 else 0) - 1


def test_two_nodes_by_hand():
    """Node 0 answers after 10, 20, 30 s, node 1 after 25 s: one update each, K = 2."""
    grid = Watched([1.0, 0.0], [1.0, 0.4], lr=0.5)
    strategy = paper(buffer_size=2)
    found, _ = models(strategy, grid, 2, x=0.0)
    far = 1 - 0.5**STEPS  # of the way to the goal
    # 10 s: node 0, 20 s: node 0 again, from the same model: added; 25 s: node 1, 30 s: node 0
    first = (far * 1.0 + far * 1.0) / 2
    second = first + (0.0 / np.sqrt(2) + far * (1 - first)) / 2
    assert found == pytest.approx([0.0, first, second])
    assert [r["virtual_s"] for r in strategy.records] == pytest.approx([0, 20, 30])
    one, two = [record["fedbuff"] for record in strategy.records[1:]]
    assert (one["nodes"], two["nodes"]) == (["node-0", "node-0"], ["node-1", "node-0"])
    assert (one["staleness"], two["staleness"]) == ([0, 0], [1, 0])
    assert [*one["age_s"], *two["age_s"]] == pytest.approx([10, 10, 25, 10])
    # both are started at 0 s, node 0 again at 10 s; with the new model at 20 s, and so on
    times, *rest = zip(*grid.sent, strict=True)
    assert times == pytest.approx((0, 0, 10, 20, 25))
    assert rest == [(0, 1, 0, 0, 1), ("train",) * 5, (1, 1, 1, 2, 2)]
    assert [r["device_s"] for r in strategy.records[1:]] == pytest.approx([40.0, 20.0])


@pytest.mark.parametrize("concurrency", [1, 3, 99])
def test_no_more_nodes_are_in_flight_than_asked_for(concurrency):
    grid = Watched([1.0] * 7, np.linspace(0.5, 4, 7), jitter=0.5, seed=3)
    models(paper(concurrency=concurrency, buffer_size=2), grid, 40)
    assert grid.most == min(concurrency, 7)
    began = {}
    for at_s, node, _, _ in grid.sent:
        began.setdefault(at_s, []).append(node)
    assert len(began[0.0]) == grid.most  # at once, and then one for each that answers
    assert all(len(nodes) == 1 for at_s, nodes in began.items() if at_s)


def test_what_clipping_leaves_out_is_said_once(caplog):
    strategy = History(FedBuff(fedavg()))
    strategy.start(Watched([*GOALS, 1.0], [5.0] * 5 + [0.5]), start(), 40)
    shares = [share for r in strategy.records[1:] for share in r["fedbuff"]["clipped_share"]]
    assert sum(share > 0 for share in shares) > 1
    (said,) = (text for text in caplog.messages if "clipped" in text)
    texts = [f"FedBuff clipped {100 * share:.0f} % of an update's weight" for share in shares]
    assert any(map(said.startswith, texts))
