"""Runs whose outcome is known by hand: grouping, labels, verdicts, and the page."""

import json
import re
from html import escape

import numpy as np
import pytest

from flwr_hetero.report.compare import compare, figures, read_runs
from flwr_hetero.report.compare.page import comparison_data, write_page
from flwr_hetero.report.compare.verdict import default_target, result_of, smooth, speed_up
from flwr_hetero.report.history import History
from flwr_hetero.report.style import METHOD_COLOURS, RUN_COLOURS, method_colours


def rounds_of(values, round_s=1.0, metric="accuracy", **more):
    return [
        {"round": i, "virtual_s": round_s * i, "global": {metric: value}, **more}
        for i, value in enumerate(values)
    ]


RISE = [0.1 * i for i in range(9)] + [0.9] * 12
"""Reaches 0.89, a point less than its end, in round 9."""
TIER = {"tier": 0, "tier_probs": [0.5, 0.5]}


def settings(policy, seed=0, **more):
    given = {"policy": policy, "seed": seed, "output-dir": f"/runs/{policy}-{seed}", **more}
    return {"settings": given}


@pytest.fixture
def three(make_run):
    """Write a baseline, a run of rounds a fifth as long, and one that never gets there."""
    base = make_run("a/base", rounds_of(RISE, 10.0), settings("vanilla"))
    lucky = [*RISE[:3], 0.95, *RISE[4:]]
    fast = make_run("b/fast", rounds_of(lucky, 2.0, tifl=TIER), settings("fast"))
    poor = make_run("c/poor", rounds_of([0.5 * v for v in RISE], 2.0), settings("slow"))
    return base, fast, poor


def test_three_runs_whose_answer_is_known(three):
    compared = compare(read_runs(three))
    assert compared.judge[:3] == ("accuracy", pytest.approx(0.89), "virtual_s")
    assert [group.results[0].to_target for group in compared.groups] == [90.0, 18.0, None]
    assert compared.sentences == [
        "policy=fast reaches accuracy 89.0 % 5.0x sooner than policy=vanilla (18 s instead of "
        "1 min 30 s) and ends level (90.0 %), because a round takes 2 s instead of 10 s (the "
        "fastest tier has 100 % of the rounds, the slowest 0 %).",
        "policy=slow does not reach accuracy 89.0 % within 40 s (policy=vanilla: after 1 min 30 "
        "s) and ends 45.0 points lower (45.0 % against 90.0 %).",
    ]
    turned = compare(read_runs(three), baseline="fast").sentences
    assert "5.0x later than policy=fast (1 min 30 s instead of 18 s)" in turned[0]
    assert "because a round takes 10 s instead of 2 s" in turned[0]
    found = figures(compared)
    assert [group["runs"][0]["to_target"] for group in found["groups"]] == [90.0, 18.0, None]
    assert found["groups"][1]["speed_up"]["factor"] == 5.0
    json.dumps(found, allow_nan=False)


def test_seeds_are_put_together(make_run):
    lengths = {"vanilla": (10.0, 12.0, 8.0), "fast": (2.0, 3.0, 1.0)}
    runs = [
        make_run(f"{policy}-{seed}", rounds_of(RISE, s), settings(policy, seed, **{"num-tiers": 5}))
        for policy, seconds in lengths.items()
        for seed, s in enumerate(seconds)
    ]
    compared = compare(read_runs(runs))
    assert [group.label for group in compared.groups] == ["policy=vanilla", "policy=fast"]
    assert compared.groups[1].speed == pytest.approx((5.0, 4.0, 8.0, 3))
    assert "5.0x sooner than policy=vanilla (4.0x to 8.0x over 3 seeds" in compared.sentences[0]
    curve = comparison_data(compared)["curves"]["lines"][1]["curves"]["accuracy"]["virtual_s"]
    assert (curve["x"][0], curve["x"][-1]) == (0.0, 0.333333)  # minutes that all seeds have
    assert all(np.less_equal(curve["low"], curve["y"]) & np.less_equal(curve["y"], curve["high"]))
    [alone] = compare(read_runs(runs[:3])).sentences
    assert alone == "Nothing to compare: 3 runs of equal settings, accuracy 90.0 % at the end."


def test_missing_fields_leave_what_there_is(make_run):
    bare = [{"round": i, "global": {"accuracy": v}} for i, v in enumerate(RISE)]
    runs = read_runs([make_run("x/a", bare), make_run("y/a", [*bare[3:], {"round": 99}])])
    compared = compare(runs)
    labels = [f"a ({run.path})" for run in runs]  # folders of one name, without settings
    assert ([group.label for group in compared.groups], compared.judge.clock) == (labels, "round")
    assert f"as soon as {labels[0]} (9 rounds instead of 9 rounds)" in compared.sentences[0]
    data = comparison_data(compared)
    assert [axis["key"] for axis in data["curves"]["axes"]] == ["round"]
    assert not re.search(r"\bnan\b|\binf\b|None", json.dumps(data, allow_nan=False))


MORE = {"alpha": 0.1, "model": "m", "fleet": "real", "batch-size": 8}


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (
            [("fast", {}), ("fast", MORE), ("slow", MORE | {"alpha": 0.2})],
            ["alpha=not set", "alpha=0.1", "alpha=0.2"],
        ),
        (  # the length of a run only if it must
            [("fast", {"num-server-rounds": n}) for n in (60, 150)],
            ["num-server-rounds=60", "num-server-rounds=150"],
        ),
        (
            [("fast", {"num-server-rounds": n, "alpha": n}) for n in (60, 150)],
            ["alpha=60", "alpha=150"],
        ),
    ],
)
def test_labels_take_the_settings_that_tell_apart(make_run, given, labels):
    runs = [
        make_run(str(place), rounds_of(RISE), settings(policy, **more))
        for place, (policy, more) in enumerate(given)
    ]
    compared = compare(read_runs(runs))
    assert [group.label for group in compared.groups] == labels
    if len(given) == 3:
        assert compared.differing == ("policy", *MORE)


@pytest.mark.parametrize(
    ("metric", "values", "target"),
    [
        ("accuracy", [0.5, 0.6, 0.7], 0.59),
        ("accuracy", [50.0, 60.0, 70.0], 59.0),
        ("loss", [3.0, 2.0, 1.0], 2.02),
    ],
)
def test_default_target(metric, values, target):
    run = History(tuple(rounds_of(values, metric=metric)))
    assert default_target([run], metric, falls=metric == "loss") == pytest.approx(target)


def test_a_lucky_round_does_not_count():
    np.testing.assert_allclose(
        smooth(np.array([0.1, 0.2, 0.9, 0.9, 0.3, 0.3])), [0.1, 0.2, 0.3, 0.3, 0.3, 0.3]
    )
    assert smooth(np.array([0.3, 0.3, 0.3, 0.3, 0.3, 0.9])).tolist() == [0.3] * 6  # nor the last
    np.testing.assert_array_equal(smooth(np.array(RISE)), RISE)


def test_speed_up_pairs_seeds(three):
    [base, *_] = read_runs(three)
    one = result_of(base.history, compare([base]).judge)

    def results(*costs):
        return [one._replace(seed=seed, to_target=cost) for seed, cost in costs]

    before = results((0, 10.0), (1, 20.0), (2, 30.0))
    assert speed_up(before, results((0, 5.0), (1, 5.0), (2, None))) == (3.0, 2.0, 4.0, 2)
    assert speed_up(before, results((7, 5.0))) == (4.0, 2.0, 6.0, 3)  # no seed in common
    assert speed_up(before, results((2, None))) is None


def test_a_method_has_one_colour():
    assert method_colours(["fedavg", "tifl"]) == [METHOD_COLOURS[m] for m in ("fedavg", "tifl")]
    many = method_colours(["tifl", "tifl", "mine", "fedavg"])
    assert many[0] == METHOD_COLOURS["tifl"]
    assert len(set(many)) == 4
    assert {*METHOD_COLOURS.values()} <= {*RUN_COLOURS}


def test_page(three, make_run, tmp_path):
    evil = "</script><script>alert(1)</script>"
    failures = [{"node": evil, "reason": evil}]
    last = make_run("d", rounds_of(RISE, failures=failures, **{"cd-grab": {}}), settings(evil))
    compared = compare(read_runs([*three, last]))
    colours = [METHOD_COLOURS["fedavg"], METHOD_COLOURS["tifl"], METHOD_COLOURS["cd-grab"]]
    assert [compared.groups[place].colour for place in (0, 1, 3)] == colours
    data = comparison_data(compared)
    page = write_page(compared, tmp_path / "page.html").read_text()
    assert evil not in page
    assert page.count('<p class="verdict">') == 3
    assert escape(compared.sentences[0]) in page
    [found] = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(found) == json.loads(json.dumps(data))
    titles = [table["title"] for table in data["tables"]]
    assert titles == ["Settings that differ", "Runs", "Tiers", "Failures"]
    assert data["tables"][0]["rows"] == [
        [(text, None) for text in ("policy", "vanilla", "fast", "slow", evil)]
    ]
    assert data["costs"]["values"] == [[90.0], [18.0], [], [9.0]]
    for line in data["curves"]["lines"]:
        for curves in line["curves"].values():
            assert all(len(c["x"]) == len(c["y"]) > 0 for c in curves.values())


@pytest.mark.parametrize(
    ("second", "options", "rule"),
    [
        ("fast", {"baseline": "x"}, "baseline must be one of base, fast, got 'x'"),
        ("fast", {"metric": "f1"}, "every run; base has accuracy, got 'f1'"),
        ("fast", {"clock": "wall_s"}, "clock must be in every run"),
        ("../a/base", {}, "DIR must differ from each other"),
        ("../empty", {}, "DIR must hold at least one round"),
        ("../nowhere", {}, "run directory must exist"),
        (None, {}, "metric must be in the history, which has none"),
    ],
)
def test_refusals(three, make_run, second, options, rule):
    make_run("empty", [])
    runs = (
        [make_run("bare", [{"round": 0}])]
        if second is None
        else [three[0], three[1].parent / second]
    )
    with pytest.raises(ValueError, match=rule):
        compare(read_runs(runs), **options)
