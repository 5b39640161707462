"""The runner: a line per run, resumed where it stopped; data sets cut to their first rows."""

import sys
from types import ModuleType

import pytest

from flwr_hetero_studies.core import bench
from flwr_hetero_studies.core.plan import Data, Options, Trial
from flwr_hetero_studies.core.record import append, by_seed, of, pack, read


@pytest.fixture
def claim(monkeypatch):
    """A claim whose second case needs the first one's result."""
    cases = ModuleType("flwr_hetero_studies.toy.cases")
    cases.SETTINGS = {"size": 3}
    cases.FAST = {"size": 1}
    cases.FAST_CASES = ["*/base"]
    cases.calls = []

    def plan(options, lines):
        shared = {"experiment": options.data, **options.settings}
        base = by_seed(of(lines, name="base", **shared))
        for seed in options.seeds_or([0, 1]):
            yield Trial({**shared, "name": "base"}, seed)
            if seed in base:
                limit = base[seed]["metrics"]["value"]
                yield Trial({**shared, "name": "rival"}, seed, {"limit": limit})

    def run(case, seed, data, limit=0.0):
        cases.calls.append((case["name"], seed))
        return {"metrics": {"value": case["size"] + seed + limit}, "curve": {"x": [1]}}

    cases.plan = plan
    cases.run = run
    monkeypatch.setitem(sys.modules, "flwr_hetero_studies.toy.cases", cases)
    return cases


def run_toy(tmp_path, patterns=("*",), **options):
    data = Data("digits", str(tmp_path / "scratch"))
    options = Options({"size": 3}, data.name, **options)
    bench.run_claim("toy", options, data, tmp_path, patterns, jobs=0)


def test_a_plan_is_followed_until_it_has_nothing_new(claim, tmp_path):
    run_toy(tmp_path)
    lines = read(tmp_path)
    assert [set(line) for line in lines] == [{"case", "seed", "metrics", "curve", "versions"}] * 4
    assert claim.calls == [("base", 0), ("base", 1), ("rival", 0), ("rival", 1)]
    assert [line["metrics"]["value"] for line in lines] == [3, 4, 6, 8]
    assert {"flwr", "torch", "numpy"} <= set(lines[0]["versions"])


def test_a_broken_off_run_makes_only_what_is_missing(claim, tmp_path):
    run_toy(tmp_path)
    lines = read(tmp_path)
    pack(tmp_path, lines[:1])
    append(tmp_path, lines[1])  # a line that was not packed yet
    claim.calls.clear()
    run_toy(tmp_path)
    assert claim.calls == [("rival", 0), ("rival", 1)]
    values = [
        [(x["case"], x["metrics"]["value"]) for x in each] for each in (lines, read(tmp_path))
    ]
    assert values[0] == values[1]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl.xz"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [(["*/base"], 2), (["digits"], 4), (["dig*/rival", "digits/base"], 4), (["other"], 0)],
)
def test_cases_are_chosen_by_experiment_and_name(claim, tmp_path, patterns, expected):
    run_toy(tmp_path, patterns)
    assert len(read(tmp_path)) == expected
