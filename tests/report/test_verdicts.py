"""Which run is better: right for any length of run, and named only where runs can show it."""

from pathlib import Path

import numpy as np
import pytest

from flwr_hetero.report.compare import Recording, compare, figures, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.history import History
from flwr_hetero.report.page import run_data
from flwr_hetero.report.run_dir import RunDirectory

FEDAVG = [0.072, 0.691, 0.883, 0.936]
FEDSLICE = [0.072, 0.763, 0.844, 0.855, 0.875]


@pytest.fixture
def verdict_of(rising):
    """Judge a run called "other" against one called "base"."""

    def judge(base, other, target=None, simulated=(True, True)):
        names = (Path("base"), Path("other"))
        runs = [
            Recording(name, History(tuple(rising(*run, simulated=mark))), {})
            for name, run, mark in zip(names, (base, other), simulated, strict=True)
        ]
        return compare(runs, target=target).groups[1].verdict

    return judge


def test_short_runs_are_judged_by_their_last_values(verdict_of):
    verdict = verdict_of((60.0, FEDAVG), (20.0, FEDSLICE))
    assert verdict.text.split("\n") == [
        "other never reaches accuracy 92.6 %, but base does after 3 min 00 s.",
        "base has the higher final accuracy (93.6 % against 87.5 %).",
        "Slowest nodes: unknown, since no node of base and other evaluated a model.",
        "Neither is called faster: this needs 5 evaluations of trained models, and one of the runs "
        "has 3.",
    ]
    assert (verdict.winner, verdict.speed) == ("base", None)
    assert verdict_of((20.0, FEDSLICE), (60.0, FEDAVG)).winner == "other"


LEVEL = [0.1, *[0.9] * 9]
LOWER = [0.1, *[0.8] * 9]
PEAK = [0.1, *[0.96] * 6, *[0.8] * 6]
NOISY = [0.1, *[0.75, 0.9] * 4, 0.82]


@pytest.mark.parametrize(
    ("base", "other", "options", "winner", "words"),
    [
        ((9.0, LEVEL), (1.0, LEVEL), {}, "other", "9.0x faster than base"),
        (
            (9.0, LEVEL),
            (9.0, LOWER),
            {},
            "base",
            "base has the higher final accuracy (90.0 % against",
        ),
        # faster, but with a lower accuracy: both are said
        ((9.0, LEVEL), (1.0, LOWER), {"target": 0.7}, None, "9.0x faster than base"),
        ((9.0, LOWER), (9.0, LOWER), {"target": 0.9}, None, "Neither other nor base reaches"),
        (
            (9.0, LEVEL),
            (9.0, PEAK),
            {"target": 0.95},
            None,
            "95.0 % after 9 s, but base never does.",
        ),
        # two evaluations after training
        ((9.0, LEVEL), (9.0, LOWER[:3]), {}, None, "needs 3 evaluations of trained models, and"),
        ((9.0, NOISY), (9.0, LEVEL), {"target": 0.6}, None, "within the noise of one seed"),
        ((9.0, [0.1, *NOISY]), (9.0, NOISY), {"target": 0.7}, None, "18 s, within one evaluation"),
        ((9.0, [0.1, *LEVEL]), (8.0, [0.1, *LEVEL]), {}, None, "about as fast as base: 16 s"),
        # another clock says nothing of time
        ((9.0, LEVEL), (1.0, LEVEL), {"simulated": (True, False)}, None, "the other on real nodes"),
        ((9.0, LEVEL), (9.0, LOWER), {"simulated": (True, False)}, "base", "base has the higher"),
        ((9.0, LEVEL), (1.0, LEVEL), {"simulated": (True, None)}, "other", "9.0x faster"),
    ],
)
def test_a_winner_is_named_only_where_runs_show_one(
    verdict_of, base, other, options, winner, words
):
    verdict = verdict_of(base, other, **options)
    assert words in verdict.text
    assert verdict.winner == winner


def test_other_data_or_another_model_have_no_winner(make_run, rising, tmp_path):
    def verdict_of_runs(name, base, other):
        runs = [
            make_run(f"{name}-{i}", rising(9.0 - 8 * i), {"settings": settings})
            for i, settings in enumerate((base, other))
        ]
        return compare(read_runs(runs)).groups[1].verdict

    both = {"dataset": "digits", "alpha": 1}
    verdict = verdict_of_runs("data", both, {"dataset": "digits", "alpha": 2})
    assert verdict.text.endswith(
        "\nNo winner is named: the data or the model is not the same (alpha)."
    )
    assert (verdict.winner, verdict.speed) == (None, None)
    assert verdict_of_runs("unknown", both, {"dataset": "digits", "x": 1}).winner
    for name, shape, is_named in (("same", (2, 3), True), ("other", (3, 2), False)):
        for i, size in enumerate(((2, 3), shape)):
            directory = RunDirectory(tmp_path / f"{name}-{i}")
            directory.save_model({"w": np.zeros(size)})
            for record in rising(9.0 - 8 * i):
                directory.append_round(record)
            directory.close()
        runs = [tmp_path / f"{name}-{i}" for i in (0, 1)]
        verdict = compare(read_runs(runs)).groups[1].verdict
        assert bool(verdict.winner) == is_named
        assert ("(names or shapes of its arrays)" in verdict.text) != is_named
    # a model that is not whole says nothing
    (runs[0] / "model.safetensors").write_bytes(b"\xff" * 20)
    assert compare(read_runs(runs)).groups[1].verdict.winner


def test_target_in_per_cent(verdict_of, rising):
    runs = [
        Recording(Path(name), History(tuple(rising(s))), {}) for name, s in (("a", 9), ("b", 1))
    ]
    comparison = compare(runs, target=85.0)
    assert comparison.judge.target == 0.85
    assert comparison.sentences[1:] == ["The target 85 is read as 85 %: accuracy is at most 1."]
    in_percent = (1.0, [100 * value for value in rising.values])
    assert "9 s to accuracy 85 instead" in verdict_of(in_percent, in_percent, 85.0).text
    with pytest.raises(ValueError, match=r"a value of loss, got 85.0: its values run from 0.1 to"):
        compare([Recording(Path("c"), History(tuple(rising(metric="loss"))), {})], target=85.0)


def random_values(rng):
    """Draw the values of a run: the untrained model's, and those of one to eight evaluations."""
    steps = rng.normal(0.05, 0.08, rng.integers(1, 9))
    return [0.1, *np.clip(0.5 + np.cumsum(steps), 0.2, 1.0).round(3).tolist()]


@pytest.mark.parametrize("seed", range(10))
def test_random_short_runs(verdict_of, rising, seed):
    rng = np.random.default_rng(seed)
    base, other = ((float(rng.choice([1, 3, 10])), random_values(rng)) for _ in range(2))
    verdict = verdict_of(base, other)
    is_short = max(len(base[1]), len(other[1])) <= 5
    ends = {"base": base[1][-1], "other": other[1][-1]}
    if is_short and verdict.winner:
        assert ends[verdict.winner] == max(ends.values())
    # The untrained model changes nothing, whatever it reaches.
    for untrained in (None, 0.0, 1.0):
        changed = [(s, [untrained, *values[1:]]) for s, values in (base, other)]
        assert verdict_of(*changed) == verdict
    # The other way round with the same target; short runs are judged without one.
    history = History(tuple(rising(*base)))
    goal = compare([Recording(Path("base"), history, {})]).judge.target
    turned = {"base": "other", "other": "base", None: None}[verdict.winner]
    assert verdict_of(other, base, goal).winner == turned
    assert not is_short or verdict_of(other, base).winner == turned


@pytest.mark.parametrize("seed", range(2))
def test_headline_tile_table_and_compare_agree(make_run, rising, seed):
    rng = np.random.default_rng(seed)
    paths = [make_run(name, rising(2.0, random_values(rng))) for name in ("base", "other")]
    runs = read_runs(paths)
    comparison = compare(runs)
    [table] = [t for t in comparison_data(comparison)["tables"] if t["title"] == "Runs"]
    place = table["head"].index("final accuracy")
    for run, row, group in zip(runs, table["rows"], figures(comparison)["groups"], strict=True):
        data = run_data(run.path)
        end = data["facts"][0]["value"]
        assert data["sentences"][0].startswith(f"Final accuracy: {end}")
        assert row[place][0] == f"{100 * group['runs'][0]['end']:.1f} %" == end
        assert end in comparison.sentences[0]
