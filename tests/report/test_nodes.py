import re

import pytest

from flwr_hetero.report import History
from flwr_hetero.report.compare.verdict import Judge
from flwr_hetero.report.nodes import node_stats
from flwr_hetero.report.page import facts
from flwr_hetero.report.tables import tables_of


def record(number, virtual_s, accuracy, latency=None, failed=(), **more):
    failures = [{"node": node, "reason": reason} for node, reason in failed]
    record = {"round": number, "virtual_s": virtual_s, "wall_s": number + 1.0}
    record |= {"global": {"accuracy": accuracy}, "latency": latency or {}, "failures": failures}
    record["device_s"] = sum((latency or {}).values())
    return record | {"selected": [*(latency or {}), "node-2"] if number else []} | more


TIERS = {"node-10": 0, "node-2": 0, "node-1": 1}
PROFILED = {"node-10": 1.0, "node-2": 2.0, "node-1": 8.0, "node-7": None}
FAILED = (("node-2", "late"), ("node-9", "odd"), *[("node-1", "odd")] * 2)
ROUNDS = (
    record(0, 10.0, 0.1, tifl={"tier_probs": [0.5, 0.5], "tiers": TIERS, "latency": PROFILED}),
    record(1, 13.0, 0.7, {"node-10": 3.0}, FAILED[:1], tifl={"tier": 0}, bytes_down=3000)
    | {"bytes_up": 1000},
    record(2, 25.0, 0.6, {"node-1": 12.0}, FAILED, bytes_up=1000)
    | {"tifl": {"tier": 1, "tier_accuracy": [0.8, None]}},
)


@pytest.mark.parametrize(("planned", "note"), [(2, "as planned"), (None, ""), (5, "of 5 planned")])
def test_summary_by_hand(planned, note):
    judge = Judge("accuracy", 0.5, "virtual_s")
    tiles = facts(History(ROUNDS), {"num-server-rounds": planned}, judge)
    assert [tuple(fact.values()) for fact in tiles] == [
        ("Final accuracy", "60.0 %", ""),
        ("Rounds", "2", note),
        ("Time on the fleet's clock", "25 s", "3 s on the server's"),
        ("Time of all devices", "15 s", "a node works for 15 % of the time"),
        ("Traffic", "5 kB", "2 kB up, 3 kB down"),
        ("Nodes", "4", "2 of them trained"),
        ("Failures", "5", ""),
    ]


def test_tables_by_hand():
    tables = {t.title: t for t in tables_of([("", None, History(ROUNDS))])}
    texts = {title: [[t for t, _ in row] for row in t.rows] for title, t in tables.items()}
    assert texts["Tiers"] == [["0", "2", "2.5 s", "1", "80.0 %"], ["1", "1", "12 s", "1", ""]]
    assert texts["Nodes"][0] == ["node-2", "0", "2 s", "2", "2"]
    assert tables["Nodes"].head == ["node", "tier", "median latency", "selected", "lost"]
    assert texts["Failures"] == [
        ["node-1", "odd", "2", "2", "2"],
        ["node-2", "late", "2", "1", "2"],
        ["node-9", "odd", "1", "2", "2"],
    ]
    # The caption explains no column that may be missing.
    columns = re.findall(r"(\w+): ", tables["Nodes"].caption)
    assert [name.lower() for name in columns] == tables["Nodes"].head[-2:]
    two = tables_of([("a", 0, History(ROUNDS)), ("b", None, History(ROUNDS))])
    assert two[0].head[:3] == ["run", "seed", "tier"]
    starts = [row[:2] for row in two[0].rows[1:3]]
    assert starts == [[("a", None), ("0", 0)], [("b", None), ("", None)]]


def test_nodes_by_tier_then_latency():
    *nodes, last = node_stats(History(ROUNDS))
    expected = [("node-2", 0, 2, 2, 2.0), ("node-10", 0, 1, 0, 3.0), ("node-1", 1, 1, 0, 12.0)]
    assert (nodes, last[:4]) == (expected, ("node-7", None, 0, 0))
    again = {"tiers": {"node-1": 0, "node-2": 1}, "latency": {"node-1": 0.5, "node-2": 0.2}}
    history = History((*ROUNDS, {"round": 3, "tifl": again}))  # the latest profiling counts
    assert [node[:2] for node in node_stats(history)[:2]] == [("node-1", 0), ("node-2", 1)]
