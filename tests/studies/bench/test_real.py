"""The race on real nodes: its plan, what lines keep, devices as measured, and how it is judged."""

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from matplotlib.figure import Figure

from flwr_hetero.fleet import DeviceProfile
from flwr_hetero_studies.core.plan import Options
from flwr_hetero_studies.core.record import of
from flwr_hetero_studies.real import cases, foretell, race, report
from flwr_hetero_studies.real.workloads import SPEEDS, fleet

NODES = {"node-0": {"message_s": 3.0, "train_s": 2.0, "first_s": [5.0, 4.0]}}


def line(trial, target_s, seconds=(1.0, 50.0, 100.0), target=0.8):
    metrics = {"target": target, "target_s": target_s, "nodes": NODES, "replies": 9, "load": 0.1}
    metrics |= {"end": 0.81, "end_slow": 0.805}
    curve = {"seconds": list(seconds), "accuracy": [0.1, 0.5, 0.81], "bytes": [0, 1, 2_000_000]}
    return {"case": trial.case, "seed": trial.seed, "metrics": metrics, "curve": curve,
            "versions": {"flwr": "1"}}  # fmt: skip


def planned(lines, **options):
    return list(cases.plan(Options(cases.SETTINGS, "data", **{"seeds": [0], **options}), lines))


def all_lines(target_s, seeds=(0,)):
    """Make all lines of a plan: ``target_s`` of each by whether it is foretold, and its name."""
    lines: dict[str, dict] = {}
    while new := [t for t in planned([*lines.values()], seeds=seeds) if t.key not in lines]:
        lines |= {t.key: line(t, target_s(t.case, t.seed)) for t in new}
    return [*lines.values()]


# --- the plan -------------------------------------------------------------------------------


def test_fedavg_comes_first_and_sets_target_and_end_of_the_others():
    first = planned([])
    assert {trial.case["name"] for trial in first} == {"FedAvg"}
    assert first[0].label == "light-warm/FedAvg"
    assert all(trial.alone for trial in first), "none disturbs another"
    then = planned([line(first[0], 90.0)])
    assert [trial.label for trial in then][:2] == ["light-warm/FedAvg", "light-warm/FedSlice"]
    assert then[1].given == {"target": 0.8, "budget_s": 120.0}
    others = {trial.label for trial in then} - {trial.label for trial in first}
    assert {label.split("/")[0] for label in others} == {"light-warm", "foretold-light-warm"}


def test_a_run_is_foretold_once_it_was_made_from_what_fedavg_measured():
    first = planned([])
    lines = [line(first[0], 90.0)]
    told = [trial for trial in planned(lines) if trial.case["foretold"]]
    assert [trial.label for trial in told] == ["foretold-light-warm/FedAvg"]
    lines += [line(planned(lines)[1], 30.0)]
    told = [trial for trial in planned(lines) if trial.case["foretold"]]
    assert [trial.case["name"] for trial in told] == ["FedAvg", "FedSlice"]
    assert told[1].given == {"target": 0.8, "budget_s": 120.0, "nodes": NODES}
    trials = planned(lines)
    assert [t.case["foretold"] for t in trials] == sorted(t.case["foretold"] for t in trials)


# --- what is run ----------------------------------------------------------------------------


# --- what a line keeps ----------------------------------------------------------------------


def history(*points, slow_s=10.0):
    """Make a run: wall seconds and accuracy of each line; two nodes answer, one reply is lost."""
    lines = []
    for number, (wall_s, accuracy) in enumerate(points):
        parts = {"wait": {"node-0": 1.0, "node-1": 2.0}, "start": {"node-1": 3.0}}
        parts["train"] = {"node-0": 4.0 + number, "node-1": slow_s}
        parts["steps"] = {"node-0": 3.0, "node-1": 9.0}
        one = {"round": number, "wall_s": wall_s, "global": {"accuracy": accuracy}}
        one |= {"bytes_down": 10, "bytes_up": 5 * number, "failures": [{}] if number == 2 else []}
        asked = {"selected": ["node-0", "node-1"], "seconds": parts} if number else {"selected": []}
        lines.append(one | asked)
    return lines


def test_target_is_a_point_below_the_end_and_between_two_points():
    run = history((1.0, 0.1), (11.0, 0.5), (21.0, 0.9), (31.0, 0.8))
    found = race.found_in(run, None)
    assert found["metrics"]["target"] == 0.79
    assert found["metrics"]["target_s"] == pytest.approx(11.0 + 10 * 0.29 / 0.3, abs=0.06)
    assert found["curve"]["seconds"] == [1.0, 11.0, 21.0, 31.0]
    assert found["curve"]["bytes"] == [10, 25, 45, 70]
    assert (found["metrics"]["replies"], found["metrics"]["failures"]) == (5, 1)


def test_one_point_at_the_target_may_be_luck():
    run = history((1.0, 0.1), (11.0, 0.9), (21.0, 0.3), (31.0, 0.9), (41.0, 0.9))
    assert race.found_in(run, 0.6)["metrics"]["target_s"] == 26.0
    assert race.found_in(run[:4], 0.6)["metrics"]["target_s"] is None
    # FedAvg has what its last point has
    assert race.found_in(run[:4], None)["metrics"]["target_s"] == pytest.approx(30.8, abs=0.06)


def test_messages_are_sums_of_their_parts_and_the_first_are_told_apart():
    points = [(number, 0.1) for number in range(6)]
    nodes = race.messages_of(history(*points))
    assert nodes["node-0"] == {"first_s": [6.0, 7.0], "message_s": 9.0, "train_s": 8.0}
    assert nodes["node-1"] == {"first_s": [15.0, 15.0], "message_s": 15.0, "train_s": 10.0}


# --- what is foretold -----------------------------------------------------------------------


def nodes_like(wait_s, start_s, epoch_s, more_s=(0.0, 0.0)):
    for speed in SPEEDS:
        train_s = epoch_s / speed
        message_s = train_s + wait_s + start_s / speed
        first_s = [message_s + more for more in more_s]
        yield {"train_s": train_s, "message_s": message_s, "first_s": first_s}


def test_devices_cost_what_was_measured():
    nodes = [*nodes_like(2.0, 0.5, 8.0, (7.0, -1.0))]
    first, second, usual = foretell.measured(fleet(10.0), nodes, 400, 0.25)
    for one, speed in zip(usual, SPEEDS, strict=True):
        assert one.compute_factor == speed
        assert one.wait_s == pytest.approx(2.0)
        assert one.start_s == pytest.approx(0.5 + 2.0), "a quarter of the work is reading"
        assert one.seconds_per_example == pytest.approx(6.0 / 400)
        assert one.uplink_mbps == 10.0
    assert [one.wait_s for one in first] == pytest.approx([9.0] * len(SPEEDS))
    assert second == usual


def test_first_messages_of_an_emulated_node_cost_more():
    app = ClientApp()

    @app.train()
    def answer(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    costs = [DeviceProfile(wait_s=wait_s) for wait_s in (9.0, 5.0, 1.0)]
    grid = foretell.StartingGrid(app, costs[:1])
    (node,) = grid.get_node_ids()
    grid.later = {node: costs[1:]}
    ends = []
    for _ in range(4):
        grid.send_and_receive([Message(RecordDict(), node, "train")])
        ends.append(grid.virtual_time_s)
    took_s = np.diff([0.0, *ends])
    assert took_s - took_s[-1] == pytest.approx([8.0, 4.0, 0.0, 0.0])


# --- the page -------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch, tmp_path):
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: None)
    return lambda lines: report.report(lines, tmp_path)


def test_ratios_are_of_one_seed_and_held_against_the_foretold_ones(page):
    def target_s(case, seed):
        if case["name"] == "FedAvg":
            return 100.0 + seed
        return 20.0 if case["foretold"] else (25.0 if case["node"] == "warm" else 50.0)

    parts = page(all_lines(target_s))
    rows = [row.split(" | ") for row in parts["table"].splitlines()]
    ours = next(row for row in rows if row[:3] == ["| heavy", "warm", "FedSlice"])
    assert ours[3:8] == ["1", "25", "4.00", "5.00", "+25 %, more than 20 %"]
    assert next(r for r in rows if r[2] == "FedAvg")[5:8] == ["", "", ""]
    assert (
        "heavy, warm nodes: wanted 3 times, measured 4.00 with 1 of 3 seeds: open"
        in (parts["verdicts"])
    )


@pytest.mark.parametrize(
    ("times_s", "said"),
    [((25.0, 26.0, 24.0), "met"), ((90.0, 91.0, 89.0), "missed"), ((25.0, 60.0, 24.0), "open")],
)
def test_a_verdict_needs_an_interval(page, times_s, said):
    def target_s(case, seed):
        return 100.0 if case["name"] == "FedAvg" else times_s[seed]

    lines = all_lines(target_s, seeds=[0, 1, 2])
    (heavy,) = [x for x in page(lines)["verdicts"].splitlines() if "heavy, warm" in x]
    assert heavy.endswith(f"by 95 %: {said}.")


def test_a_target_that_was_not_reached_is_no_ratio(page):
    lines = all_lines(lambda case, seed: 100.0 if case["name"] == "FedAvg" else None)
    parts = page(of(lines, workload="light"))
    assert "| light | warm | FedSlice | 1 | not reached |  |" in parts["table"]
    assert "not reached in 1 of 1 runs" in parts["verdicts"]
    assert page([]) == {}
