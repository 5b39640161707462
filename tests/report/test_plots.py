import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex

from flwr_hetero.report.history import History
from flwr_hetero.report.plots import PLOTS, plots_of, render
from flwr_hetero.report.plots_nodes import draw_latency, draw_selection, draw_tiers
from flwr_hetero.report.plots_rounds import (
    draw_against_traffic,
    draw_main_metric,
    draw_other_metrics,
    draw_round_times,
    draw_wrapper,
    fans,
)
from flwr_hetero.report.style import DARK, LIGHT, tier_colours


@pytest.fixture(scope="module")
def history(rounds_of):
    return History(tuple(rounds_of(30)))


@pytest.fixture(autouse=True)
def theme():
    with LIGHT.applied():
        yield


@pytest.mark.parametrize(("factor", "unit", "seconds"), [(1, "s", 1), (3600, "d", 86400)])
def test_progress_shows_every_value(history, factor, unit, seconds):
    slow = History(tuple({**r, "virtual_s": factor * r["virtual_s"]} for r in history.rounds))
    by_time, by_round = draw_main_metric(slow).axes
    accuracy = [record["global"]["accuracy"] for record in history.rounds]
    np.testing.assert_array_equal(by_time.lines[0].get_ydata(), accuracy)
    np.testing.assert_array_equal(by_round.lines[0].get_xdata(), np.arange(31))
    assert by_time.get_xlabel() == f"time on the fleet's clock ({unit})"
    times = slow.column("virtual_s") / seconds
    np.testing.assert_allclose(by_time.lines[0].get_xdata(), times)
    assert by_time.get_ylabel() == "accuracy"


def test_long_curve_is_zoomed(history):
    values = np.concatenate([[0.1, 0.5], np.full(60, 0.97), np.full(20, 0.98)])
    rounds = tuple(
        {**history.rounds[1], "round": i, "global": {"accuracy": v, "loss": 1 - v}}
        for i, v in enumerate(values)
    )
    low, high = draw_main_metric(History(rounds)).axes[1].get_ylim()
    assert 0.96 < low < 0.97
    assert 0.98 < high < 0.99
    short = History(rounds[:10])
    assert draw_main_metric(short).axes[1].get_ylim()[0] < 0.1


def test_metrics_against_total_traffic(history):
    accuracy, loss = draw_against_traffic(history).axes
    total = np.cumsum([r["bytes_up"] + r["bytes_down"] for r in history.rounds])
    for axis, name in ((accuracy, "accuracy"), (loss, "loss")):
        np.testing.assert_allclose(axis.lines[0].get_xdata(), total)
        expected = [record["global"][name] for record in history.rounds]
        np.testing.assert_array_equal(axis.lines[0].get_ydata(), expected)
    silent = tuple({**r, "bytes_up": 0, "bytes_down": 0} for r in history.rounds)
    assert draw_against_traffic(History(silent)) is None


def test_metrics_of_zeros_are_left_out(history):
    rounds = [{**r, "train": {"scored": 0, "loss": 1.0}, "evaluate": {}} for r in history.rounds]
    titles = [axes.get_title(loc="left") for axes in draw_other_metrics(History((*rounds,))).axes]
    assert titles == ["Loss", "Train: loss"]


def test_tiers_are_drawn_where_they_trained(history):
    axes = draw_tiers(history).axes[0]
    for tier, lines in enumerate(axes.collections):
        drawn = [segment[0, 0] for segment in lines.get_segments()]
        assert drawn == [r["round"] for r in history.rounds if r["tifl"]["tier"] == tier]
    assert axes.get_yticklabels()[0].get_text() == "tier 0 (fastest)"
    assert axes.yaxis_inverted()


def test_panels_without_figures_are_left_out(history):
    rounds = [{**r, "tifl": {**r["tifl"], "credits": [None] * 5}} for r in history.rounds]
    titles = [axes.get_title(loc="left") for axes in draw_tiers(History(tuple(rounds))).axes]
    assert len(titles) == 3
    assert not any("Credits" in title for title in titles)


def test_selection_counts_good_and_lost_rounds(history):
    axes = draw_selection(history).axes[0]
    good, vain = (
        [path.get_extents().height for path in bars.get_paths()] for bars in axes.collections[:2]
    )
    asked = [name for record in history.rounds for name in record["selected"]]
    failed = [fault["node"] for record in history.rounds for fault in record["failures"]]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert failed
    np.testing.assert_allclose(np.add(good, vain), [asked.count(name) for name in names])
    np.testing.assert_allclose(vain, [failed.count(name) for name in names])


def test_latency_is_coloured_by_tier(history):
    axes = draw_latency(history).axes[0]
    names = [label.get_text() for label in axes.get_xticklabels()]
    tiers = history.rounds[0]["tifl"]["tiers"]
    profiled = axes.collections[-1]
    colours = [to_hex(colour) for colour in profiled.get_facecolors()]
    assert colours == [tier_colours(5)[tiers[name]] for name in names]
    latency = history.rounds[0]["tifl"]["latency"]
    np.testing.assert_allclose(profiled.get_offsets()[:, 1], [latency[name] for name in names])


def test_round_times_are_clock_differences(history):
    axes = draw_round_times(history).axes[0]
    clock = np.array([record["virtual_s"] for record in history.rounds])
    np.testing.assert_allclose(axes.collections[0].get_offsets()[:, 1], np.diff(clock))


def test_figures_of_a_new_wrapper_need_no_code():
    others = {"on": True, "text": "x", "mixed": [1, "x"], "empty": [], "unknown": None}
    rounds = [
        {
            "round": number,
            "new-method": {
                "bound": 1.0 / number,
                "pair": [number, None],
                "steps": {f"node-{i}": i + number for i in range(number, number + 4)},
                "many": list(range(9)),
                **others,
            },
        }
        for number in (1, 2, 3, 4)
    ]
    history = History(tuple(rounds))
    found = {fan.key: fan for fan in fans(history, "new-method")}
    assert list(found) == ["bound", "pair", "steps", "many", "on"]
    assert found["pair"].values.tolist() == [[1], [2], [3], [4]]
    assert found["steps"].labels == [f"node-{i}" for i in range(1, 8)]
    np.testing.assert_array_equal(found["steps"].values[1], [np.nan, 4, 5, 6, 7, *[np.nan] * 2])
    axes = [axes for axes in draw_wrapper(history, "new-method").axes if axes.get_visible()]
    assert len(axes) == 5
    np.testing.assert_array_equal(axes[2].lines[0].get_ydata(), [3.5, 5.5, 7.5, 9.5])
    assert [plot.name for plot in plots_of(history)][len(PLOTS) :] == ["wrapper-new-method"]


def test_legend_covers_no_curve():
    parts = {"10 % are below": 0.1, "50 % are below": 0.7, "90 % are below": 3.0}
    rounds = tuple({"round": i, "sampler": {"importance": parts}} for i in range(1, 9))
    drawn = draw_wrapper(History(rounds), "sampler")
    drawn.draw_without_rendering()
    axes = drawn.axes[0]
    box = axes.get_legend().get_window_extent()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(parts)
    assert max(axes.transData.transform((1, y))[1] for y in parts.values()) < box.y0


@pytest.mark.parametrize(("count", "said"), [(12, ""), (14, "The first 12 of 14 are shown")])
def test_caption_counts_what_is_left_out(count, said):
    numbers = {f"figure-{i}": i + 1.0 for i in range(count)}
    metrics = {"accuracy": 0.5, **numbers}
    history = History(({"round": 1, "train": metrics, "new-method": numbers},))
    plots = {plot.name: plot for plot in plots_of(history)}
    for plot in (plots["metrics"], plots["wrapper-new-method"]):
        assert ("are shown" in plot.caption) is bool(said)
        assert said in plot.caption
        visible = [axes for axes in plot.draw(history).axes if axes.get_visible()]
        assert len(visible) == 12


def test_server_clock_is_named():
    rounds = tuple({"round": i, "wall_s": 1.0 + i, "global": {"accuracy": 0.5}} for i in range(3))
    by_time = draw_main_metric(History(rounds)).axes[0]
    assert by_time.get_xlabel() == "time on the server's clock (s)"


@pytest.mark.parametrize(
    "rounds",
    [
        (),
        ({"round": 0},),
        ({"round": 0, "wall_s": 0.1}, {"round": 1, "wall_s": 0.2}),
        ({"round": 5, "virtual_s": 9.0, "global": {"accuracy": None, "loss": 1.5}},),
        ({"round": 0, "global": {"accuracy": 0.5}}, {"round": 1, "global": {"accuracy": 0.6}}),
        ({"round": 0, "tifl": {"tier": None, "tier_probs": [1.0]}},),
        ({"round": 1, "selected": ["a"], "failures": [{"node": "a", "reason": "b"}] * 2},),
        ({"round": 1, "latency": {"a": 0.0, "b": None}},),
    ],
)
def test_sparse_histories(rounds):
    history, before = History(rounds), dict(mpl.rcParams)
    for plot in plots_of(history):
        picture = render(plot, history, DARK)
        assert picture is None or picture.startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before
