import pytest
from recording import history

pytestmark = [pytest.mark.app, pytest.mark.nightly]


@pytest.fixture(scope="module")
def whole(flower, tmp_path_factory):
    """Run 20 nodes for 8 rounds; give the run directory and the log."""
    out = tmp_path_factory.mktemp("tifl") / "whole"
    log = flower("tifl", 20, num_server_rounds=8, interval=4, output_dir=out)
    return out, log


def test_twenty_nodes_on_the_papers_fleet(whole):
    out, log = whole
    assert f"{out}/report.html" in log, log[-3000:]
    assert f"{out}/compare.html" in log, log[-3000:]
    baseline, rounds = history(out / "baseline"), history(out)
    assert [record["round"] for record in rounds] == list(range(9))
    assert len(baseline) == 5  # ceil(0.4 * 8), and round 0
    tiers, latency = rounds[0]["tifl"]["tiers"], rounds[0]["tifl"]["latency"]
    by_speed = sorted(latency, key=latency.get)
    assert [tiers[node] for node in by_speed] == [i // 4 for i in range(20)]
    assert {node for node in tiers if tiers[node] == 4} == {f"node-{i}" for i in range(16, 20)}
    assert rounds[-1]["global"]["accuracy"] > rounds[0]["global"]["accuracy"]
    assert not any(record["failures"] for record in rounds)
    for name in ("config.json", "model.safetensors", "report.html", "checkpoint/state.npz"):
        assert (out / name).stat().st_size > 0, name
    assert list(out.glob("*.png"))


def test_same_seed_and_a_resume_give_the_same_run(whole, flower, tmp_path):
    out = tmp_path / "broken"
    flower("tifl", 20, num_server_rounds=3, interval=4, output_dir=out, baseline=False)
    log = flower(
        "tifl", 20, num_server_rounds=8, interval=4, output_dir=out, resume=True, baseline=False
    )
    assert "Resumed after round 3" in log, log[-3000:]

    def essence(folder):
        keys = ("round", "virtual_s", "global", "latency")
        return [[record[key] for key in keys] for record in history(folder)]

    assert essence(out) == essence(whole[0])


def test_two_nodes_are_enough_and_it_says_so(flower, tmp_path):
    out = tmp_path / "run"
    log = flower("tifl", num_server_rounds=2, output_dir=out, baseline=False)
    assert "2 nodes are too few for 5 tiers" in log, log[-3000:]
    assert history(out)[0]["tifl"]["num_tiers"] == 2


def test_bad_setting_is_one_error_before_training(flower, tmp_path):
    log = flower("tifl", alpha=-1.0, output_dir=tmp_path / "run")
    assert "ValueError: alpha must" in log, log[-3000:]
    assert not (tmp_path / "run" / "history.jsonl").exists()
