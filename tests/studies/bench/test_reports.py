"""Pages from the results: how costs, gains and misses are read; the committed pages stand."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flwr_hetero_studies.core import bench
from flwr_hetero_studies.core.experiment import PAPERS
from flwr_hetero_studies.core.record import read
from flwr_hetero_studies.objectives import report as objectives
from flwr_hetero_studies.papers import report as papers
from flwr_hetero_studies.papers.mercury import report as mercury
from flwr_hetero_studies.papers.tifl import report as tifl


@pytest.mark.parametrize("claim", bench.CLAIMS)
def test_committed_page_is_what_its_results_say(claim, tmp_path, monkeypatch):
    if claim != "tifl":  # one is enough to see that figures can be written: it takes seconds
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **how: Path(path).touch())
    folder = bench.CLAIMS[claim]
    text = bench.page_of(claim, read(folder), tmp_path)
    assert text == (folder / "report.md").read_text(encoding="utf-8")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in folder.glob("*.png")}
    assert all(f"({name})" in text for name in drawn)


def test_every_claim_is_counted_and_listed():
    found = papers.best(read(bench.CLAIMS["papers"]))
    rows = {paper: papers.rows_of(paper, found) for paper in PAPERS}
    count = sum(map(len, rows.values()))
    page = (bench.CLAIMS["papers"] / "report.md").read_text(encoding="utf-8")
    assert f"Of {count} claims: " in page
    for paper, own in rows.items():
        page = bench.CLAIMS[paper.replace("-", "_")] / "report.md"
        first, _, text = page.read_text(encoding="utf-8").partition("## Claims of the paper")
        assert papers.summed(own) in first
        for _, *claim in own:
            cells = " | ".join(each.replace("|", r"\|") for each in claim)
            assert f" | {cells} |\n" in text


def line(name, seed, accuracy, **curve):
    return {
        "case": {"experiment": "data", "name": name, "rounds": 60, "most": 3,
                 "train-examples": 30, "learning-rate": 0.1},
        "seed": seed,
        "metrics": {"took_s": 60.0, "profiling_s": curve.pop("profiling_s", 0.0)},
        "curve": {"accuracy": list(accuracy), **curve},
        "versions": {"flwr": "1"},
    }  # fmt: skip


def rising(name, seed, rise, round_s=1.0, rounds=60, most=0.8):
    """Rise by so much a round up to ``most``, and stay there."""
    numbers = range(rounds + 1)
    columns = {"round": 1.0, "virtual_s": round_s, "bytes": 2.0, "device_s": 3.0}
    curve = {key: [factor * n for n in numbers] for key, factor in columns.items()}
    return line(name, seed, [min(most, rise * n) for n in numbers], **curve)


# --- objectives -----------------------------------------------------------------------------


def test_settings_that_lose_slow_classes_are_in_bold():
    lines = {}
    for name, slow in (("FedAvg", 0.5), ("TiFL, paced", 0.47), ("biased, sqrt", 0.49)):
        lines[name] = rising(name, 0, rise=0.04)
        lines[name]["curve"]["slow"] = [slow] * len(lines[name]["curve"]["accuracy"])
    rows = [objectives.row(n, [each], [lines["FedAvg"]])[2:4] for n, each in lines.items()]
    assert rows == [["50.0", ""], ["47.0", "**-3.0**"], ["49.0", "-1.0"]]


# --- tifl -----------------------------------------------------------------------------------


def tifl_line(seed, clock_s, accuracy, profiling_s=0.0):
    return line("vanilla", seed, accuracy, clock_s=clock_s, profiling_s=profiling_s)


def test_accuracy_holds_until_the_next_round_ends():
    time, curve = tifl.mean_curve([tifl_line(0, [0, 50, 100], [0.0, 0.6, 0.9])], {0: 100.0})
    at = dict(zip(np.round(time, 5).tolist(), curve.tolist(), strict=True))
    assert at[0.499] == 0.0
    assert at[0.5] == pytest.approx(0.3)  # mean of the two rounds so far
    assert at[0.999] == pytest.approx(0.3)
    assert at[1.0] == pytest.approx(0.5)


def test_each_seed_runs_in_its_own_time():
    lines = [tifl_line(0, [0, 50], [0.0, 1.0]), tifl_line(1, [0, 200], [0.0, 1.0])]
    time, curve = tifl.mean_curve(lines, {0: 100.0, 1: 200.0})
    assert np.nanmax(curve) == pytest.approx(0.25)  # seed 0 at 0.5; seed 1 still at 0
    assert np.isnan(curve[time > 0.5]).all()


def test_profiling_delays_the_whole_curve():
    run, unit_s = [tifl_line(0, [0, 50], [0.9, 0.9], profiling_s=10)], {0: 100.0}
    assert tifl.time_to(0.9, *tifl.mean_curve(run, unit_s)) == "0.00"
    assert tifl.time_to(0.9, *tifl.mean_curve(run, unit_s, profiling=True)) == "0.10"
    assert tifl.time_to(0.95, *tifl.mean_curve(run, unit_s)) == "never"


# --- mercury --------------------------------------------------------------------------------


def test_gain_is_ratio_of_times_to_uniforms_end():
    uniform, faster = rising("uniform", 0, 0.01, rounds=100), rising("bacc", 0, 0.02, rounds=100)
    assert mercury.time_to(faster, 0.41, "round") == pytest.approx(20.5)
    assert mercury.end_accuracy(uniform) == pytest.approx(0.8)
    assert mercury.gain(uniform, uniform, 0.04) == 1.0
    assert mercury.gain(faster, uniform, 0.1) == pytest.approx(2.0)
    slower = rising("bacc", 0, 0.02, round_s=4.0, rounds=100)
    assert mercury.gain(slower, uniform, 0.1) == pytest.approx(0.5)
    assert mercury.pooled_gain(faster, uniform) == pytest.approx(2.0, rel=0.1)
