import pytest

from flwr_hetero.report.compare import NamedRun, compare, default_target, draw_comparison, read_runs
from flwr_hetero.report.history import History, time_to_target


def run_of(name, values, round_s, metric="accuracy"):
    rounds = [
        {"round": i, "virtual_s": round_s * i, "wall_s": 1.0 * i, "global": {metric: value}}
        for i, value in enumerate(values)
    ]
    return NamedRun(name, History(tuple(rounds)))


SLOW = run_of("slow", [0.1, 0.4, 0.6, 0.7, 0.8], 10.0)
FAST = run_of("fast", [0.1, 0.3, 0.5, 0.7, 0.9], 2.0)
POOR = run_of("poor", [0.1, 0.2, 0.2, 0.3, 0.3], 1.0)


def test_time_to_target_and_speed_up_by_hand():
    comparison = compare([SLOW, FAST, POOR], target=0.7)
    assert [(row.to_target, row.speed_up) for row in comparison.rows] == [
        *((30.0, 1.0), (6.0, 5.0), (None, None))
    ]
    assert [(row.final, row.best, row.rounds, row.total) for row in comparison.rows[:2]] == [
        *((0.8, 0.8, 4, 40.0), (0.9, 0.9, 4, 8.0))
    ]


def test_another_baseline_and_clock():
    comparison = compare([SLOW, FAST], target=0.5, baseline="fast", clock="round")
    assert [(row.to_target, row.speed_up) for row in comparison.rows] == [(2.0, 1.0), (2.0, 1.0)]
    comparison = compare([SLOW, FAST], target=0.5, baseline="fast")
    assert [row.speed_up for row in comparison.rows] == [0.2, 1.0]


def test_baseline_without_target_gives_no_ratio():
    comparison = compare([POOR, FAST], target=0.7)
    assert [row.speed_up for row in comparison.rows] == [None, None]


def test_losses_are_better_when_they_fall():
    first = run_of("a", [3.0, 2.0, 1.0], 1.0, "loss")
    second = run_of("b", [3.0, 1.0, 0.5], 1.0, "loss")
    comparison = compare([first, second])
    assert comparison.target == pytest.approx(2.0 / 0.99)
    assert [row.to_target for row in comparison.rows] == [1.0, 1.0]
    assert [row.best for row in comparison.rows] == [1.0, 0.5]


def test_which_way_is_better_can_be_said():
    first = run_of("a", [3.0, 2.0, 1.0], 1.0, "drift")
    second = run_of("b", [3.0, 1.0, 0.5], 1.0, "drift")
    by_name, told = compare([first, second], target=1.5), compare([first, second], falls=True)
    assert [row.to_target for row in by_name.rows] == [0.0, 0.0]
    assert told.target == pytest.approx(2.0 / 0.99)
    assert [row.to_target for row in told.rows] == [1.0, 1.0]
    assert [row.best for row in told.rows] == [1.0, 0.5]
    legend = draw_comparison(told).axes[1].get_legend()
    assert legend._loc == 1  # upper right, where a falling curve leaves room


def test_every_run_reaches_the_default_target():
    runs = [SLOW, FAST, POOR]
    target = default_target(runs, "accuracy")
    assert target == pytest.approx(0.2 * 0.99)
    assert all(time_to_target(run.history, "accuracy", target) is not None for run in runs)


def test_runs_are_named_after_their_folders(make_run):
    one, two, three = (make_run(name, [{"round": 0}]) for name in ("x/seed-0", "y/seed-0", "z"))
    assert [run.name for run in read_runs([one, three])] == ["seed-0", "z"]
    names = [run.name for run in read_runs([one, two])]
    assert names == ["x/seed-0", "y/seed-0"]


def test_bad_comparisons_are_refused(make_run, tmp_path):
    run = make_run("run", [{"round": 0}])
    with pytest.raises(ValueError, match="DIR must differ from each other"):
        read_runs([run, f"{run}/../run"])
    with pytest.raises(ValueError, match="DIR must hold at least one round"):
        read_runs([run, make_run("empty", [])])
    with pytest.raises(ValueError, match="run directory must exist"):
        read_runs([run, tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="baseline must be one of slow, fast, got 'x'"):
        compare([SLOW, FAST], baseline="x")
    with pytest.raises(ValueError, match="every run; fast has accuracy, got 'f1'"):
        compare([FAST], "f1")
    loss_only = run_of("other", [1.0], 1.0, "loss")
    with pytest.raises(ValueError, match="every run; other has loss, got 'accuracy'"):
        compare([FAST, loss_only])
    with pytest.raises(ValueError, match="metric must be in the history, which has none"):
        compare(read_runs([run]))


def test_figure_shows_runs_and_costs():
    by_time, by_round, cost = draw_comparison(compare([SLOW, FAST, POOR], target=0.7)).axes
    assert [text.get_text() for text in by_round.get_legend().get_texts()] == [
        *("slow", "fast", "poor")
    ]
    assert by_time.get_ylim()[0] < 0.7 < by_time.get_ylim()[1]
    assert by_time.lines[1].get_xdata().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert by_round.lines[0].get_ydata().tolist() == [0.1, 0.4, 0.6, 0.7, 0.8]
    assert [bar.get_width() for bar in cost.patches] == [30.0, 6.0, 0.0]
    assert [text.get_text() for text in cost.texts] == ["30 s", "6 s, 5 x faster", "never"]


def test_target_is_on_a_zoomed_axis():
    long = run_of("long", [0.1, *[0.9] * 40], 1.0)
    for target in (0.3, 1.0):
        axes = draw_comparison(compare([long], target=target)).axes[0]
        assert axes.get_ylim()[0] <= target <= axes.get_ylim()[1]
