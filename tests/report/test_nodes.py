import pytest

from flwr_hetero.report import History
from flwr_hetero.report.compare.verdict import Judge
from flwr_hetero.report.nodes import failure_groups, node_stats, num_tiers
from flwr_hetero.report.page import facts
from flwr_hetero.report.tables import Named, tables_of


def record(number, virtual_s, accuracy, latency=None, failed=(), **more):
    failures = [{"node": node, "reason": reason} for node, reason in failed]
    record = {"round": number, "virtual_s": virtual_s, "wall_s": number + 1.0}
    record |= {"global": {"accuracy": accuracy}, "latency": latency or {}, "failures": failures}
    return record | {"selected": [*(latency or {}), "node-2"] if number else []} | more


TIERS = {"node-10": 0, "node-2": 0, "node-1": 1}
PROFILED = {"node-10": 1.0, "node-2": 2.0, "node-1": 8.0, "node-7": None}
FAILED = (
    ("node-2", "late"),
    ("node-9", "odd"),
    *[("node-1", "odd")] * 2,
)  # the last ones evaluating
ROUNDS = (
    record(0, 10.0, 0.1, tifl={"tier_probs": [0.5, 0.5], "tiers": TIERS, "latency": PROFILED}),
    record(1, 13.0, 0.7, {"node-10": 3.0}, FAILED[:1], tifl={"tier": 0}, bytes_down=3000)
    | {"bytes_up": 1000},
    record(2, 25.0, 0.6, {"node-1": 12.0}, FAILED, bytes_up=1000)
    | {"tifl": {"tier": 1, "tier_accuracy": [0.8, None]}},
)


@pytest.mark.parametrize(("planned", "note"), [(2, "as planned"), (None, ""), (5, "of 5 planned")])
def test_summary_by_hand(planned, note):
    judge = Judge("accuracy", 0.5, "virtual_s", falls=False)
    found = facts(History(ROUNDS), {"num-server-rounds": planned}, judge)
    server = "3 s on the server's clock, 10 s of it before round 1"
    assert [tuple(fact.values()) for fact in found] == [
        ("Last accuracy", "60.0 %", "best 70.0 % in round 1"),
        ("Rounds", "2", note),
        ("Time on the fleet's clock", "25 s", server),
        ("Time of all devices", "15 s", "0.6 nodes in flight on average"),
        ("Traffic", "5 kB", "2 kB up, 3 kB down"),
        ("Nodes", "4", "2 of them trained"),
        ("Failures", "5", "in 2 rounds"),
    ]


def test_tables_by_hand():
    tables = {t.title: t for t in tables_of([Named("", None, History(ROUNDS))])}
    texts = {title: [[t for t, _ in row] for row in t.rows] for title, t in tables.items()}
    assert tables["Tiers"].head[:3] == ["tier", "nodes", "median latency"]
    assert texts["Tiers"] == [
        ["0", "2", "2.5 s", "1", "50 %", "3 s", "80.0 %"],
        ["1", "1", "12 s", "1", "50 %", "12 s", ""],
    ]
    assert texts["Nodes"][0] == ["node-2", "0", "2 s", "2", "2"]
    assert tables["Nodes"].head == ["node", "tier", "median latency", "asked", "lost"]
    assert texts["Failures"][:2] == [["node-1", "odd", "2", "2"], ["node-2", "late", "2", "1, 2"]]
    two = tables_of([Named("a", 0, History(ROUNDS)), Named("b", None, History(ROUNDS))])
    assert two[0].head[:3] == ["run", "seed", "tier"]
    starts = [row[:2] for row in two[0].rows[1:3]]
    assert starts == [[("a", None), ("0", 0)], [("b", None), ("", None)]]


def test_nodes_by_tier_then_latency():
    nodes = node_stats(History(ROUNDS))
    assert [node.identity for node in nodes] == ["node-2", "node-10", "node-1", "node-7"]
    counts = [(node.tier, node.selected, node.lost) for node in nodes]
    assert counts == [(0, 2, 2), (0, 1, 0), (1, 1, 0), (None, 0, 0)]
    assert (nodes[1].profiled_s, nodes[1].latency_s.tolist()) == (1.0, [3.0])
    again = {"tiers": {"node-1": 0, "node-2": 1}, "latency": {"node-1": 0.5, "node-2": 0.2}}
    history = History((*ROUNDS, {"round": 3, "tifl": again}))  # the latest profiling counts
    found = [(node.identity, node.tier, node.profiled_s) for node in node_stats(history)[:2]]
    assert found == [("node-1", 0, 0.5), ("node-2", 1, 0.2)]  # by tier before latency
    assert (num_tiers(history), num_tiers(History(({"round": 0},)))) == (2, 0)


def test_failure_groups_most_frequent_first():
    expected = [("node-1", "odd", [2, 2]), ("node-2", "late", [1, 2]), ("node-9", "odd", [2])]
    assert failure_groups(History(ROUNDS)) == expected
