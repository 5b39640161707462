"""The race on real nodes: its plan, what lines keep, devices as measured, and how it is judged."""

import sys
from importlib import import_module

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_hetero.client.device import message_time_s
from flwr_hetero.fleet import named_fleet
from flwr_hetero_studies.core.plan import Data, Options
from flwr_hetero_studies.race.node import Learning
from flwr_hetero_studies.real import cases, race, report, waiting

NODES = {"node-0": {"message_s": 3.0, "train_s": 2.0, "first_s": [5.0, 4.0]}}


def line(trial, target_s, seconds=(1.0, 50.0, 100.0), target=0.8):
    metrics = {"target": target, "target_s": target_s, "nodes": NODES, "replies": 9, "load": 0.1}
    metrics |= {"end": 0.81, "end_slow": 0.805}
    curve = {"seconds": list(seconds), "accuracy": [0.1, 0.5, 0.81], "bytes": [0, 1, 2_000_000]}
    return {"case": trial.case, "seed": trial.seed, "metrics": metrics, "curve": curve,
            "versions": {"flwr": "1"}}  # fmt: skip


def planned(lines, **options):
    return list(cases.plan(Options(cases.SETTINGS, "data", **{"seeds": [0], **options}), lines))


# --- the plan -------------------------------------------------------------------------------


def test_fedavg_comes_first_and_sets_target_and_end_of_the_others():
    first = planned([])
    assert first.pop(0).label == "waiting/all"
    assert {trial.case["name"] for trial in first} == {"FedAvg"}
    assert first[0].label == "light-warm/FedAvg"
    assert all(trial.alone for trial in first), "none disturbs another"
    then = planned([line(first[0], 90.0)])[1:]
    assert [trial.label for trial in then][:2] == ["light-warm/FedAvg", "light-warm/FedSlice"]
    assert then[1].given == {"target": 0.8, "budget_s": 120.0}
    others = {trial.label for trial in then} - {trial.label for trial in first}
    assert {label.split("/")[0] for label in others} == {"light-warm", "foretold-light-warm"}


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


def test_a_message_costs_all_that_is_no_training():
    # Of one node 1 s, and of the other 2 and 3 s.
    assert waiting.message_cost(history((1.0, 0.1), (11.0, 0.5))) == 3.0


def test_a_message_waits_for_a_poll_and_costs_as_much_on_average():
    for cost_s, poll_s in ((2.5, 3.0), (0.5, 1.0)):
        devices = waiting.polling(named_fleet(waiting.PACE, 5), cost_s)
        assert [device.poll_s for device in devices] == [poll_s] * 5
        assert {message_time_s(device) for device in devices} == {cost_s}
        assert [device.compute_factor for device in devices] == [4.0, 2.0, 1.0, 0.5, 0.1]


# --- twenty nodes that wait -------------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waiting")
    learning = Learning("digits", waiting.NUMPY, "dirichlet", waiting.NODES, waiting.ROWS, 5)
    waiting.write_data(learning, folder)
    return learning, folder


def test_each_method_trains_on_emulated_devices_and_ends_by_fedavgs_limits(waiting_folder):
    _, folder = waiting_folder
    devices = named_fleet(waiting.PACE, waiting.NODES)
    found = {}
    for method in waiting.METHODS:
        config = waiting.run_config(method, folder, 5, 2) | {"pace": ""} | waiting.limits_of(found)
        history = waiting.emulate(config, devices)
        found[method] = waiting.found_in(history, found)
    base = found["FedAvg"]
    assert base["curve"]["accuracy"][-1] > base["curve"]["accuracy"][0]
    for run in found.values():
        assert run["target"] == base["target"]
        assert run["replies"] > 0
    late = waiting.LATE * base["curve"]["seconds"][-1]
    assert found["FedBuff"]["target_s"] or found["FedBuff"]["curve"]["seconds"][-1] > late


def test_each_draw_has_the_seconds_of_each_method(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "DRAWS", 2)
    found = waiting.run_emulated(Data("digits", str(tmp_path)), 5, 2, 0.5, tmp_path)
    target_s = found["metrics"]["target_s"]
    assert list(target_s) == list(waiting.METHODS)
    first, second = target_s["FedAvg"]
    assert first != second, "another draw has other nodes"


def test_a_node_waits_until_its_device_would_have_taken_the_steps(waiting_folder, monkeypatch):
    _, folder = waiting_folder
    sys.path.insert(0, str(waiting.APP))
    client = import_module("waiting_app.client_app")
    slept = []
    monkeypatch.setattr(client.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(client.time, "sleep", slept.append)
    server = import_module("waiting_app.server_app")
    config = waiting.app_config() | waiting.run_config("FedAvg", folder, 5, 2)
    content = {"arrays": server.first_arrays(config), "config": ConfigRecord({"server-round": 1})}
    metadata = {"dst_node_id": 1, "message_type": "train"}
    node = {"partition-id": 19, "num-partitions": 20}
    context = Context(1, 1, node, RecordDict(), config)
    reply = client.app(Message(RecordDict(content), **metadata), context)
    examples = reply.content["metrics"]["num-examples"]
    assert sum(slept) == pytest.approx(examples * 0.01 / 0.1)
    assert len(slept) == -(-examples // 16)


def test_a_row_has_the_measured_and_the_predicted_speed_up():
    def runs(fast_s):
        both = {"FedAvg": 100.0, "FedSlice": fast_s}
        curve = {"seconds": [0.0, 50.0], "bytes": [0, 1e6]}
        more = {"curve": curve, "replies": 9, "end": 0.8, "end_slow": 0.7}
        return {name: {"target_s": seconds, **more} for name, seconds in both.items()}

    metrics = {"found": runs(20.0), "advised": {"FedSlice": {"mixed": 4.0}}}
    lines = [{"case": {}, "seed": seed, "metrics": metrics} for seed in (0, 1)]
    drawn = {"FedAvg": [80.0, 125.0], "FedSlice": [16.0, 16.0]}
    emulated = [{"case": {}, "seed": 0, "metrics": {"target_s": drawn}}]
    row = report.waiting_table(lines, emulated).splitlines()[-1]
    assert "| FedSlice | 20 (20 to 20) | 5.00 (5.00 to 5.00) | 6.25 | +25 %" in row
    assert "+25 %, more than 20 % | 4.00 (4.00 to 4.00) | -20 % |" in row
    metrics["found"]["FedSlice"]["target_s"] = None
    assert "not reached" in report.waiting_table(lines, emulated).splitlines()[-1]
