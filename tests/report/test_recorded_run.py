"""The run directory under a real strategy, on a fleet that fails now and then, and resumed."""

import json

from flwr.app import MetricRecord
from toy import toy_app, toy_arrays

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.report import RunDirectory, read_history, time_to_target
from flwr_hetero.report.nodes import node_stats, num_tiers
from flwr_hetero.report.page import run_data
from flwr_hetero.strategy import Recorded, TiFL


def train(path, num_rounds, *, resume=False):
    profiles = [DeviceProfile(speed, jitter=0.1, availability=0.9) for speed in (4.0, 1.0) * 3]
    run_dir = RunDirectory(path, {"num-server-rounds": 6, "seed": 0}, resume=resume)
    tifl = TiFL(clients_per_round=2, num_tiers=2, interval=2, profiling="phase")
    Recorded(tifl, run_dir=run_dir, resume=resume).start(
        LocalGrid(toy_app(), profiles=profiles, seed=0),
        toy_arrays(),
        num_rounds=num_rounds,
        evaluate_fn=lambda number, _: MetricRecord({"accuracy": number / 10}),
    )
    return json.loads((path / "config.json").read_text())


def test_run_leaves_a_whole_directory(tmp_path):
    path = tmp_path / "run"
    before = train(path, 3)
    with (path / "history.jsonl").open("a") as file:
        file.write('{"round": 4, "virtual_s": 1.0}\n{"round": 5, "vir')  # killed in round 5
    after = train(path, 6, resume=True)
    assert (len(before["resumed"]), len(after["resumed"])) == (0, 1)
    assert after["started"] == before["started"]
    history = read_history(path)
    assert history.notes == ()
    assert history.column("round").tolist() == [0, 1, 2, 3, 4, 5, 6]
    nodes = node_stats(history)
    assert {node.identity for node in nodes} == {f"node-{i}" for i in range(6)}
    assert (num_tiers(history), sum(node.selected for node in nodes)) == (2, 12)
    assert time_to_target(history, "accuracy", 0.3) == history.column("virtual_s")[3]
    assert history.rounds[-1]["fairness"]["metric"] == "eval-acc"
    titles = [panel["title"] for panel in run_data(path)["panels"]]
    assert titles[:3] == ["Tier that trained", "Chance of each tier", "Accuracy of each tier"]
    assert {file.name for file in path.iterdir()} >= {"model.safetensors", "checkpoint"}
