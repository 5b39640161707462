import pytest

from flwr_hetero.report.compare import compare, default_target, draw_comparison, read_runs
from flwr_hetero.report.history import History, time_to_target


def run_of(values, round_s=1.0, metric="accuracy"):
    rounds = [
        {"round": i, "virtual_s": round_s * i, "wall_s": 1.0 * i, "global": {metric: value}}
        for i, value in enumerate(values)
    ]
    return History(tuple(rounds))


SLOW = run_of([0.1, 0.4, 0.6, 0.7, 0.8], 10.0)
FAST = run_of([0.1, 0.3, 0.5, 0.7, 0.9], 2.0)
POOR = run_of([0.1, 0.2, 0.2, 0.3, 0.3])
ALL = {"slow": SLOW, "fast": FAST, "poor": POOR}


def test_rows_by_hand():
    assert [row[1:] for row in compare(ALL, target=0.7).rows] == [
        (4, 0.8, 0.8, 40.0, 30.0, 1.0),
        (4, 0.9, 0.9, 8.0, 6.0, 5.0),
        (4, 0.3, 0.3, 4.0, None, None),
    ]


@pytest.mark.parametrize(
    ("target", "settings", "costs", "ratios"),
    [
        (0.5, {"baseline": "fast", "clock": "round"}, [2.0, 2.0, None], [1.0, 1.0, None]),
        (0.5, {"baseline": "fast"}, [20.0, 4.0, None], [0.2, 1.0, None]),
        (0.7, {"baseline": "poor"}, [30.0, 6.0, None], [None] * 3),
    ],
)
def test_baseline_and_clock(target, settings, costs, ratios):
    rows = compare(ALL, target=target, **settings).rows
    assert [row.to_target for row in rows] == costs
    assert [row.speed_up for row in rows] == ratios


@pytest.mark.parametrize(("metric", "falls"), [("loss", None), ("drift", True)])
def test_metric_that_falls(metric, falls):
    values = {"a": [3.0, 2.0, 1.0], "b": [3.0, 1.0, 0.5]}
    runs = {name: run_of(given, metric=metric) for name, given in values.items()}
    compared = compare(runs, falls=falls)
    assert compared.target == pytest.approx(2.0 / 0.99)
    assert [(row.to_target, row.best) for row in compared.rows] == [(1.0, 1.0), (1.0, 0.5)]
    assert [row.to_target for row in compare(runs, target=1.5, falls=False).rows] == [0.0, 0.0]
    legend = draw_comparison(compared).axes[1].get_legend()
    assert legend._loc == 1  # upper right, where a falling curve leaves room


def test_every_run_reaches_the_default_target():
    target = default_target(ALL, "accuracy", falls=False)
    assert target == pytest.approx(0.2 * 0.99)
    assert all(time_to_target(run, "accuracy", target) is not None for run in ALL.values())


def test_runs_are_named_after_their_folders(make_run):
    one, two, three = (make_run(name, [{"round": 0}]) for name in ("x/seed-0", "y/seed-0", "z"))
    assert list(read_runs([one, three])) == ["seed-0", "z"]
    assert list(read_runs([one, two])) == ["x/seed-0", "y/seed-0"]


def test_read_runs_refusals(make_run, tmp_path):
    run = make_run("run", [{"round": 0}])
    for second, rule in (
        (f"{run}/../run", "DIR must differ from each other"),
        (make_run("empty", []), "DIR must hold at least one round"),
        (tmp_path / "nowhere", "run directory must exist"),
    ):
        with pytest.raises(ValueError, match=rule):
            read_runs([run, second])


@pytest.mark.parametrize(
    ("runs", "settings", "rule"),
    [
        (ALL, {"baseline": "x"}, "baseline must be one of slow, fast, poor, got 'x'"),
        ({"fast": FAST}, {"metric": "f1"}, "every run; fast has accuracy, got 'f1'"),
        (
            {"fast": FAST, "other": run_of([1.0], metric="loss")},
            {},
            "every run; other has loss, got 'accuracy'",
        ),
        ({"run": History(({"round": 0},))}, {}, "metric must be in the history, which has none"),
    ],
)
def test_compare_refusals(runs, settings, rule):
    with pytest.raises(ValueError, match=rule):
        compare(runs, **settings)


def test_figure_shows_runs_and_costs():
    by_time, by_round, cost = draw_comparison(compare(ALL, target=0.7)).axes
    assert [text.get_text() for text in by_round.get_legend().get_texts()] == list(ALL)
    assert by_time.get_ylim()[0] < 0.7 < by_time.get_ylim()[1]
    assert by_time.lines[1].get_xdata().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert by_round.lines[0].get_ydata().tolist() == [0.1, 0.4, 0.6, 0.7, 0.8]
    assert [bar.get_width() for bar in cost.patches] == [30.0, 6.0, 0.0]
    assert [text.get_text() for text in cost.texts] == ["30 s", "6 s, 5 x faster", "never"]
