"""How the headline's page reads costs, and misses, from its runs."""

import json

import pytest

from benchmarks.headline import report


def run(setting, seed, rise, round_s=1.0, rounds=60, most=0.8):
    """Rise by so much a round up to ``most``, and stay there."""
    numbers = range(rounds + 1)
    return {
        "setting": setting,
        "seed": seed,
        "took_s": 60.0,
        "virtual_s": [n * round_s for n in numbers],
        "bytes": [2.0 * n for n in numbers],
        "device_s": [3.0 * n for n in numbers],
        "accuracy": [min(most, rise * n) for n in numbers],
        "dataset": "data",
        "train_examples": 30,
        "learning_rate": 0.1,
        "most": 3,
        "command": "python run.py data",
        "versions": {"flwr": "1"},
    }


def test_a_target_is_reached_by_the_mean_of_five_rounds():
    line = run("FedAvg", 0, rise=0.1)
    assert report.final(line) == pytest.approx(0.8)
    assert report.cost_to(line, 0.6) == {
        "virtual_s": 8.0, "bytes": 16.0, "device_s": 24.0, "rounds": 8.0
    }  # fmt: skip
    assert report.cost_to(line, 0.81) is None


def test_the_page_says_how_many_seeds_do_not_get_there(tmp_path, monkeypatch):
    lines = [run("FedAvg", seed, rise=0.02) for seed in (0, 1)]
    lines += [run("all five", seed, rise=0.02, round_s=0.25) for seed in (0, 1)]
    lines += [run("all but TiFL", 0, rise=0.04), run("all but TiFL", 1, rise=0.04, most=0.5)]
    source = tmp_path / "data.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr("sys.argv", ["report.py", str(source)])
    report.main()
    page = (tmp_path / "report.md").read_text()
    assert "or 3 times as many rounds" in " ".join(page.split())
    assert "30 training and 10 test examples" in page
    assert "All five reach the target 4.0 times sooner than FedAvg; the end is +0.0" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| all but TiFL |"))
    assert row.split(" | ")[1].endswith("x; 1 of 2 not")
    assert "Without TiFL it is 1.9 times (1 of 2 not within its rounds)" in page
    assert (tmp_path / "data.png").stat().st_size > 1000
