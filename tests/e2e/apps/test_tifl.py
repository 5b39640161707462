import pytest
from recording import history

pytestmark = [pytest.mark.app, pytest.mark.nightly]


@pytest.fixture
def go(flower, tmp_path):
    """Run the app with the paper's phase, on 20 nodes; give its log and the history."""

    def run(name, rounds=8, num_nodes=20, **settings):
        out = tmp_path / name
        how = {"num_server_rounds": rounds, "sync_rounds": 1, "output_dir": out} | settings
        log = flower("tifl", num_nodes, **how)
        assert f"{out}/report.html" in log, log[-3000:]
        return log, history(out)

    return run


def test_twenty_nodes_on_the_papers_fleet_and_a_resume(go, tmp_path):
    log, rounds = go("whole", interval=4)
    out = tmp_path / "whole"
    assert f"{out}/compare.html" in log, log[-3000:]
    assert [record["round"] for record in rounds] == list(range(9))
    assert len(history(out / "baseline")) == 5  # ceil(0.4 * 8), and round 0
    tiers, latency = rounds[0]["tifl"]["tiers"], rounds[0]["tifl"]["latency"]
    by_speed = sorted(latency, key=latency.get)
    assert [tiers[node] for node in by_speed] == [i // 4 for i in range(20)]
    assert {node for node in tiers if tiers[node] == 4} == {f"node-{i}" for i in range(16, 20)}
    assert rounds[-1]["global"]["accuracy"] > rounds[0]["global"]["accuracy"]
    assert not any(record["failures"] for record in rounds)
    for name in ("config.json", "model.safetensors", "report.html", "checkpoint/state.npz"):
        assert (out / name).stat().st_size > 0, name
    go("broken", 3, interval=4, baseline=False)
    log, again = go("broken", interval=4, baseline=False, resume=True)
    assert "Resumed after round 3" in log, log[-3000:]
    for key in ("round", "global", "latency"):
        assert [record[key] for record in again] == [record[key] for record in rounds]
    # which node of a simulation is asked for a handler first is chance
    lengths = [[r["virtual_s"] - run[0]["virtual_s"] for r in run] for run in (again, rounds)]
    assert lengths[0] == pytest.approx(lengths[1])


def test_two_nodes_are_enough_and_it_says_so(go):
    log, rounds = go("run", 2, 2, baseline=False)
    assert "2 nodes are too few for 5 tiers" in log, log[-3000:]
    assert sorted(rounds[0]["tifl"]["tiers"].values()) == [0, 1]


def test_bad_setting_is_one_error_before_training(flower, tmp_path):
    log = flower("tifl", alpha=-1.0, output_dir=tmp_path / "run")
    assert "ValueError: alpha must" in log, log[-3000:]
    assert not (tmp_path / "run" / "history.jsonl").exists()
