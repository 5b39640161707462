"""What a page shows without scripts, and by what it is judged."""

import re

import pytest

from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.page import render, run_data
from flwr_hetero.report.picture import HEIGHT, LEFT, RIGHT, WIDTH, picture_of


def curves(points, *, log=False, target=None, label="a"):
    x, y = zip(*points, strict=True)
    metric = {"key": "accuracy", "label": "Accuracy", "percent": True, "target": target}
    line = {"label": label, "colour": "#000000", "curves": {"accuracy": {"t": {"x": x, "y": y}}}}
    return {"metrics": [metric], "axes": [{"key": "t", "label": "t", "log": log}], "lines": [line]}


def places(picture):
    [(_, _, points)] = picture["lines"]
    return [tuple(map(float, point.split(","))) for point in points.split()]


def test_picture_is_to_scale():
    found = picture_of(curves([(0, 0.0), (5, 0.5), (10, 1.0)], target=0.75))
    (x0, y0), (x1, y1), (x2, y2) = places(found)
    assert (x0, x2) == (LEFT, WIDTH - RIGHT)
    assert (2 * x1, 2 * y1) == (x0 + x2, y0 + y2)
    assert found["x_ticks"][0] == (x0, "0")
    assert found["y_ticks"][-1] == (y2, "100 %")
    assert found["target"] == (pytest.approx((y1 + y2) / 2, abs=0.1), "75.0 %")
    assert HEIGHT > y0 > y1 > y2


def test_picture_on_a_logarithmic_axis():
    found = picture_of(curves([(0, 0.1), (1, 0.2), (10, 0.3), (100, 0.4)], log=True))
    (x0, _), (x1, _), (x2, _) = places(found)  # 0 has no place
    assert x2 - x1 == pytest.approx(x1 - x0)
    assert [text for _, text in found["x_ticks"]] == ["1", "2", "5", "10", "20", "50", "100"]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("y", [0.0, 5e-324, -1e308, 1e308, None])
@pytest.mark.parametrize("x", [0.0, 5e-324, 1.0, 1e99, 1e308])
def test_no_number_breaks_the_picture(x, y, log):
    for points in ([(x, y)], [(0.0, 0.0), (x, y)], [(1.0, 1e-9), (x, y)]):
        picture_of(curves(points, log=log))


def test_page_without_scripts_has_picture_and_tables(make_run, rising):
    name = "<b>evil"
    runs = [
        make_run(policy, rising(round_s), {"settings": {"policy": f"{name}{policy}", "seed": 0}})
        for policy, round_s in (("slow", 10.0), ("fast", 1.0))
    ]
    data = comparison_data(compare(read_runs(runs)))
    page = re.sub(r"<script.*?</script>", "", render(data), flags=re.DOTALL)
    assert "<b>" not in page
    assert page.count("<polyline") == 2
    assert ">1 min 30 s</td>" in page
    assert ">target 89.0 %</text>" in page
    assert data["notes"][0] in page
    data = run_data(make_run("one", rising(1.0, selected=[name])))
    page = re.sub(r"<script.*?</script>", "", render(data), flags=re.DOTALL)
    assert (page.count("<polyline"), page.count('class="value"')) == (1, len(data["facts"]))
    assert "<td>&lt;b&gt;evil</td>" in page


@pytest.mark.parametrize(("ratio", "logarithmic"), [(4.0, False), (6.0, True)])
def test_time_axis_shows_the_quickest_run(make_run, rising, ratio, logarithmic):
    runs = [make_run(str(s), rising(s), {"settings": {"lr": s}}) for s in (1.0, ratio)]
    axes = comparison_data(compare(read_runs(runs)))["curves"]["axes"]
    assert {axis["key"]: axis["log"] for axis in axes} == {"virtual_s": logarithmic, "round": False}
    assert not run_data(runs[0])["curves"]["axes"][0]["log"]


def test_one_seed_has_a_caveat(make_run, rising):
    def notes(*kinds):
        runs = [
            make_run(f"{len(kinds)}-{kind}-{i}", rising(), {"settings": {"p": kind, "seed": i}})
            for i, kind in enumerate(kinds)
        ]
        return comparison_data(compare(read_runs(runs)))["notes"]

    assert notes("a") == notes("a", "b", "a", "b") == []
    assert notes("a", "b")[0].startswith("One seed of each kind: ")
    assert notes("a", "a", "b")[0].startswith("One seed of p=b: ")


def test_run_is_judged_by_its_own_target(make_run, rising):
    settings = {"settings": {"target-accuracy": 0.5}}
    why = "accuracy 0.9 has reached target-accuracy 0.5"
    data = run_data(make_run("own", rising(10.0, stopped=why), settings))
    text = f"50.0 % is reached after 50 s, in round 5 of 20. It ended early: {why}."
    assert data["sentences"] == [f"Accuracy 90.0 % at the end; {text}"]
    assert [metric["target"] for metric in data["curves"]["metrics"]] == [0.5]
    loss = run_data(make_run("loss", rising(metric="loss"), settings))
    assert loss["curves"]["metrics"][0]["target"] != 0.5
