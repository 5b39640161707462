"""Runs whose outcome is known by hand: grouping, labels, sentences, and the page."""

import json
import re
from html import escape

import numpy as np
import pytest

from flwr_hetero.report.compare import compare, figures, read_runs
from flwr_hetero.report.compare.page import comparison_data, write_page
from flwr_hetero.report.compare.verdict import result_of, speed_up
from flwr_hetero.report.page import run_data


def settings(policy, seed=0, **more):
    defaults = {"policy": policy, "seed": seed, "output-dir": f"/runs/{policy}-{seed}"}
    return {"settings": defaults | more}


@pytest.fixture
def three(make_run, rising):
    """Write a baseline, a run of rounds a fifth as long, and one that never reaches it."""
    base = make_run("a/base", rising(10.0), settings("vanilla"))
    outlier = [*rising.values[:3], 0.95, *rising.values[4:]]
    tiers = {"tier": 0, "tier_probs": [0.5, 0.5]}
    fast = make_run("b/fast", rising(2.0, outlier, tifl=tiers), settings("fast"))
    poor = make_run("c/poor", rising(2.0, [0.5 * v for v in rising.values]), settings("slow"))
    return base, fast, poor


def test_three_runs_whose_answer_is_known(three):
    compared = compare(read_runs(three))
    assert compared.judge == ("accuracy", pytest.approx(0.89), "virtual_s")
    assert [group.results[0].to_target for group in compared.groups] == [90.0, 18.0, None]
    assert [text.split("\n") for text in compared.sentences] == [
        [
            "fast is 5.0x faster than vanilla: 18 s to accuracy 89.0 % instead of 1 min 30 s.",
            "Final accuracy: 90.0 % against 90.0 %.",
            "Slowest nodes: unknown, since no node of vanilla and fast evaluated a model.",
            "A round takes 2 s instead of 10 s, and fast needs 9 rounds instead of 9.",
        ],
        [
            "slow never reaches accuracy 89.0 %, but vanilla does after 1 min 30 s.",
            "vanilla has the higher final accuracy (90.0 % against 45.0 %).",
            "Slowest nodes: unknown, since no node of vanilla and slow evaluated a model.",
            # once, however many runs lack it
            "To measure the slowest nodes, set fraction_evaluate=1.0 in FedAvg(...) of the "
            "ServerApp, and give the ClientApp an @app.evaluate() function.",
        ],
    ]
    [turned, _] = compare(read_runs([three[1], three[0], three[2]])).sentences
    assert "5.0x slower than fast: 1 min 30 s to accuracy 89.0 % instead of 18 s" in turned
    numbers = json.loads(json.dumps(figures(compared), allow_nan=False))
    assert [group["runs"][0]["to_target"] for group in numbers["groups"]] == [90.0, 18.0, None]
    assert numbers["groups"][1]["speed_up"]["factor"] == 5.0
    winners = [group["winner"] for group in numbers["groups"]]
    assert winners == [None, "fast", "vanilla"]


def measured(round_s, quality, steps=None, nodes=10, counts=True):
    """Make rounds of nodes of which the last two are slow, and evaluate the model worse there."""
    names = [f"node-{i}" for i in range(nodes)]
    slow = names[-2:]
    rounds = []
    for number in range(12):
        values = dict.fromkeys(names, 0.9) | dict.fromkeys(slow, quality)
        seconds = {name: round_s * (1.0 if steps or name not in slow else 5.0) for name in names}
        record = {"round": number, "virtual_s": round_s * number, "latency": seconds}
        record |= {"bytes_up": 1000, "bytes_down": 1000, "device_s": 10 * round_s}
        record["global"] = {"accuracy": min(0.1 * number, 0.9)}
        if steps:
            many = {"num_steps": {name: 1 if name in slow else steps for name in names}}
            record["local_steps"] = many
        fairness = {"metric": "eval_acc", "mean": 0.8, "worst_tenth": quality - 0.1}
        record["fairness"] = fairness | {"nodes": nodes if counts else 500, "by_node": values}
        rounds.append(record)
    return rounds


def test_headline_says_for_whom_and_at_what_price(make_run):
    base = make_run("base", measured(10.0, 0.5))
    sliced = make_run("sliced", measured(1.0, 0.7, steps=8))
    compared = compare(read_runs([base, sliced]))
    headline, _, slow, price, _ = compared.sentences[0].split("\n")
    assert len(headline.split()) <= 25
    where = "Slowest fifth of the nodes: eval accuracy"
    assert slow == f"{where} 70.0 % against 50.0 % on their own data."
    # Round 9 is the tenth one in the history.
    assert price == (
        "Price until then: 20 kB sent and received instead of 20 kB (1x), 1 min 40 s of device "
        "time instead of 16 min 40 s (0.1x)."
    )
    data = comparison_data(compared)
    [table] = [table for table in data["tables"] if table["title"] == "Runs"]
    shown = [[text for text, _ in row][-4:-1] for row in table["rows"]]
    assert shown == [["50.0 %", "20 kB", "16 min 40 s"], ["70.0 %", "20 kB", "1 min 40 s"]]
    lines = run_data(sliced)["sentences"][0].split("\n")
    assert lines[1] == f"{where} 70.0 % on their own data."
    assert lines[2] == "Price of the run: 24 kB sent and received, 2 min 00 s of device time."


def test_slowest_nodes_are_named_only_where_all_values_are_known(make_run):
    large = [make_run(f"large-{i}", measured(s, 0.5, counts=False)) for i, s in enumerate((9, 1))]
    [text] = compare(read_runs(large)).sentences
    assert "\nWorst tenth of the nodes: eval accuracy 40.0 % against 40.0 % on their" in text
    rounds = measured(9.0, 0.5)
    for record in rounds:
        del record["fairness"]
    without = make_run("silent", rounds)
    [text] = compare(read_runs([without, large[0]])).sentences
    assert "\nSlowest nodes: unknown, since no node of silent evaluated a model.\n" in text
    assert text.endswith("@app.evaluate() function.")
    # A fleet whose nodes have other names has its own slowest nodes.
    renamed = json.loads(json.dumps(measured(1.0, 0.6)).replace("node-", "board-"))
    other = make_run("other", renamed)
    [text] = compare(read_runs([make_run("own", measured(9.0, 0.5)), other])).sentences
    assert "eval accuracy 60.0 % against 50.0 %" in text


def test_an_axis_has_one_unit_for_short_and_long_runs(make_run):
    base = make_run("base", measured(600.0, 0.5))
    fast = make_run("fast", measured(2.0, 0.5))
    data = comparison_data(compare(read_runs([base, fast])))
    axes = {axis["key"]: axis for axis in data["curves"]["axes"]}
    assert axes["virtual_s"]["log"]
    assert axes["virtual_s"]["label"] == "time on the fleet's clock (s)"
    # The bars have the unit of the curves.
    assert data["costs"]["axis"] == "virtual_s"
    [axis, *_] = comparison_data(compare(read_runs([base])))["curves"]["axes"]
    assert (axis["label"], axis["scale"]) == ("time on the fleet's clock (min)", 60.0)


def test_seeds_are_put_together(make_run, rising):
    lengths = {"vanilla": (10.0, 12.0, 8.0), "fast": (2.0, 3.0, 1.0)}
    runs = [
        make_run(f"{policy}-{seed}", rising(s), settings(policy, seed, **{"num-tiers": 5}))
        for policy, seconds in lengths.items()
        for seed, s in enumerate(seconds)
    ]
    compared = compare(read_runs(runs))
    assert [group.label for group in compared.groups] == ["vanilla", "fast"]
    assert compared.groups[1].verdict.speed == pytest.approx((5.0, 4.0, 8.0, 3))
    headline = compared.sentences[0].partition("\n")[0]
    assert "fast is 5.0x faster than vanilla (4.0x to 8.0x over 3 pairs): 18 s to" in headline
    assert len(headline.split()) <= 25
    curve = comparison_data(compared)["curves"]["lines"][1]["curves"]["accuracy"]["virtual_s"]
    assert (curve["x"][0], curve["x"][-1]) == (0.0, 20.0)  # seconds that all seeds have
    assert all(np.less_equal(curve["low"], curve["y"]) & np.less_equal(curve["y"], curve["high"]))
    [alone] = compare(read_runs(runs[:3])).sentences
    assert alone == "Nothing to compare: 3 runs with the same settings, final accuracy 90.0 %."


def test_missing_fields_leave_what_there_is(make_run, rising):
    bare = [{"round": i, "global": {"accuracy": v}} for i, v in enumerate(rising.values)]
    runs = read_runs([make_run("x/a", bare), make_run("y/a", [*bare[3:], {"round": 99}])])
    compared = compare(runs)
    labels = [f"a ({run.path})" for run in runs]  # folders of one name, without settings
    assert ([group.label for group in compared.groups], compared.judge.clock) == (labels, "round")
    assert f"about as fast as {labels[0]}: 9 rounds to accuracy" in compared.sentences[0]
    data = comparison_data(compared)
    assert [axis["key"] for axis in data["curves"]["axes"]] == ["round"]
    assert not re.search(r"\bnan\b|\binf\b|None", json.dumps(data, allow_nan=False))


@pytest.mark.parametrize(
    ("some", "labels"),
    [
        ([{}, *({"alpha": a, "b": 1} for a in (0, 1))], ["alpha=not set", "alpha=0", "alpha=1"]),
        # the length of a run only if it must
        ([{"base": n} for n in ("FedAvg", "x=1")], ["FedAvg", "x=1"]),
        ([{"path": n} for n in ("/a", "")], ["path=/a", "path=not set"]),
        ([{"num-server-rounds": n} for n in (6, 15)], [f"num-server-rounds={n}" for n in (6, 15)]),
        ([{"num-server-rounds": n, "alpha": n} for n in (6, 15)], ["alpha=6", "alpha=15"]),
        (
            [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}],
            ["a=0, b=0", "a=0, b=1", "a=1, b=0"],
        ),
    ],
)
def test_labels_take_the_settings_that_tell_apart(make_run, rising, some, labels):
    runs = [make_run(str(i), rising(), settings("fast", **more)) for i, more in enumerate(some)]
    compared = compare(read_runs(runs))
    assert [group.label for group in compared.groups] == labels
    if {} in some:
        assert compared.differing == ["alpha", "b"]


def test_speed_up_pairs_seeds(three):
    [base, *_] = read_runs(three)
    one = result_of(base.history, compare([base]).judge)

    def results(*costs):
        return [one._replace(seed=seed, to_target=cost) for seed, cost in costs]

    before = results((0, 10.0), (1, 20.0), (2, 30.0))
    assert speed_up(before, results((0, 5.0), (1, 5.0), (2, None))) == (3.0, 2.0, 4.0, 2)
    assert speed_up(before, results((7, 5.0))) == (4.0, 2.0, 6.0, 3)  # no seed in common
    assert speed_up(before, results((2, None))) is None


def test_page(three, make_run, rising, tmp_path):
    evil = "</script><script>alert(1)</script>"
    failures = [{"node": evil, "reason": evil}]
    last = make_run("d", rising(failures=failures), settings(evil))
    compared = compare(read_runs([*three, last]))
    page = write_page(compared, tmp_path / "page.html").read_text()
    assert evil not in page
    assert page.count('<p class="verdict">') == 3
    lines = [line for text in compared.sentences for line in text.split("\n")]
    assert page.count('<p class="detail">') == len(lines) - 3
    assert all(f">{escape(line)}</p>" in page for line in lines)
    data = comparison_data(compared)
    titles = [table["title"] for table in data["tables"]]
    assert titles == ["Settings that differ", "Runs", "Tiers", "Failures"]
    row = [(text, None) for text in ("policy", "vanilla", "fast", "slow", evil)]
    assert data["tables"][0]["rows"] == [row]
    assert data["costs"]["values"] == [[90.0], [18.0], [], [9.0]]
    assert len({line["colour"] for line in data["curves"]["lines"]}) == 4


@pytest.mark.parametrize(
    ("second", "options", "rule"),
    [
        ("fast", {"metric": "f1"}, "every run; base has accuracy after round 0, got 'f1'"),
        ("fast", {"clock": "wall_s"}, "clock must be one of virtual_s, round, got 'wall_s'"),
        ("fast", {"target": np.nan}, "target must be a number in"),
        ("fast", {"target": 101.0}, "target must be .* 101.0: its values run from 0.1 to 0.9"),
        ("../only-0", {}, "in every run; only-0 has none after round 0, got 'accuracy'"),
        ("../a/base", {}, "DIR must differ from each other"),
        ("../empty", {}, "DIR must hold at least one round"),
        ("../nowhere", {}, "run directory must exist"),
        (None, {}, "metric must be in the history, which has none"),
    ],
)
def test_refusals(three, make_run, rising, second, options, rule):
    make_run("empty", [])
    make_run("only-0", rising(values=[0.1]))
    alone = [make_run("bare", [{"round": 0}])]
    runs = alone if second is None else [three[0], three[1].parent / second]
    with pytest.raises(ValueError, match=rule):
        compare(read_runs(runs), **options)
