"""What must come of a row on any grid: counts and order, never seconds."""

from math import isfinite

QUICK = tuple(f"node-{i}" for i in range(0, 8, 2))
"""Every second node takes its time."""


def check(name, row, outcome, rounds=None, *, on_nodes=True, by_speed=True):
    """Compare what came of a row with what it promises.

    ``on_nodes``: whether nodes evaluate; ``by_speed``: whether half of eight nodes are slower, by
    more than the grid takes for a message.
    """
    rounds = rounds or row.rounds
    if row.error:
        assert outcome["error"].startswith(f"MissingClientSupportError: {row.error}"), outcome
        return
    assert not outcome["error"], outcome["error"]
    records = outcome["records"]
    assert [record["round"] for record in records] == [*range(rounds + 1)]
    assert outcome["central"] == [*range(rounds + 1)]
    assert not any(record["failures"] for record in records)
    assert isfinite(outcome["w"])
    # towards where all goals are; the first two updates count little, for others are not known yet
    assert outcome["w"] > 0.03
    if on_nodes:
        # one a round, or one of the last model at least
        evaluated = outcome["evaluated"]
        assert evaluated[-1] == rounds
        assert not row.evaluates_each_round or evaluated == [*range(1, rounds + 1)]
        assert records[-1]["evaluate"]["eval-loss"] > 0
    for record in records[1:]:
        assert record["train"]["taken"] == record["train"]["asked"], record
    if not by_speed:
        return
    asked = {round(record["train"]["asked"], 6) for record in records[2:]}
    assert row.asks_steps == (asked != {8.0}), asked
    if name in CHECKS:
        CHECKS[name](records)


def two_tiers(records):
    """See the quick nodes in one tier and the slow ones in the other, and rounds of one tier."""
    tiers = [record["tifl"]["tiers"] for record in records if "tiers" in record["tifl"]][-1]
    assert tiers == {f"node-{i}": i % 2 for i in range(8)}
    for record in records[-2:]:
        assert len({tiers[node] for node in record["selected"]}) == 1


def quick_nodes_more_often(records):
    """See all nodes, and the quick ones in more of the updates."""
    nodes = [node for record in records[1:] for node in record["selected"]]
    assert len(set(nodes)) == 8
    assert sum(node in QUICK for node in nodes) > len(nodes) / 2


def quick_nodes_take_more_steps(name):
    """See nodes take steps by their speed, once it is known."""

    def check_steps(records):
        steps = records[-1][name]["num_steps"]
        quick = [count for node, count in steps.items() if node in QUICK]
        slow = [count for node, count in steps.items() if node not in QUICK]
        assert sum(quick) / len(quick) > sum(slow) / len(slow), steps

    return check_steps


def slices(records):
    """See both, and rounds of about the examples of a round of FedAvg."""
    quick_nodes_more_often(records)
    steps = records[-1]["local_steps"]["num_steps"]
    quick = [count for node, count in steps.items() if node in QUICK]
    # Where a message costs more than a few steps, as on a busy machine, slices are whole jobs.
    assert min(quick) >= max(count for node, count in steps.items() if node not in QUICK), steps
    facts = [record["fedslice"] for record in records[1:]]
    trained, wanted = (sum(f[key] for f in facts) for key in ("examples", "examples_wanted"))
    assert trained >= 0.9 * wanted


def packed_slices(records):
    """See slices, and replies of less than half of the model's bytes."""
    slices(records)
    assert [record["compressed"] for record in records[1:]] == [{"without_mod": 0}] * 4
    replies = sum(len(record["selected"]) for record in records)
    assert sum(record["bytes_up"] for record in records) / replies < 300 * 4 / 2


CHECKS = {
    "BiasedLocalSGD": quick_nodes_take_more_steps("biased_local_sgd"),
    "Compressed": packed_slices,
    "FedBuff": quick_nodes_more_often,
    "FedSlice": slices,
    "LocalSteps": quick_nodes_take_more_steps("local_steps"),
    "TiFL": two_tiers,
}
