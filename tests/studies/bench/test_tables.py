"""Lines, tables and curves that all claims read by."""

import json

import numpy as np
import pytest

from flwr_hetero_studies.core import curves, record, tables


def test_lines_are_grouped_paired_and_selected(tmp_path):
    lines = [
        {"case": {"experiment": "e", "name": name}, "seed": seed, "metrics": {"x": 1.0}}
        for name in ("base", "ours")
        for seed in (0, 1)
    ]
    (tmp_path / record.RESULTS).write_text("\n".join(map(json.dumps, lines)))
    assert record.read(tmp_path) == lines
    groups = record.by(lines, "name")
    assert list(groups) == ["base", "ours"]
    assert record.by(lines, "experiment", "name")["e", "ours"] == groups["ours"]
    assert record.of(lines, name="ours") == groups["ours"]
    assert record.pairs(groups["ours"], groups["base"][:1]) == [(lines[2], lines[0])]
    assert record.seeds(lines) == [0, 1]


def test_smoothing_is_trailing_or_centred():
    values = [0.0, 1.0, 2.0, 6.0]
    assert curves.smooth(values, 3).tolist() == [0.0, 0.5, 1.0, 3.0]
    assert curves.smooth(values, 3, whole=True).tolist() == [1.0, 3.0]
    assert curves.smooth(values, 3, centred=True) == pytest.approx([1 / 3, 1.0, 3.0, 14 / 3])


def test_a_target_is_reached_at_a_row_or_between_two():
    values = [0.0, 0.2, 0.6, 0.5]
    assert curves.reached(values, 0.4) == 2
    assert curves.reached(values, 0.4, between=True) == pytest.approx(1.5)
    assert curves.reached([np.inf, 1.0], 0.5, between=True) == 0
    assert curves.reached([-np.inf, 1.0], 0.5, between=True) == 1
    assert np.isnan(curves.reached(values, 0.7))
    assert curves.at([10.0, 20.0, 40.0, 50.0], 1.5) == 30.0
    assert np.isnan(curves.at([10.0, 20.0], float("nan")))
    assert curves.time_to([0, 10, 20, 30], values, 0.4) == pytest.approx(15.0)
    assert curves.time_to([0, 10, 20, 30], values, 0.4, between=False) == 20
    assert curves.time_to([0, 10, 20, 30], values, 0.7, never=99.0) == 99.0


def test_curves_are_folded_where_all_have_values():
    clocks, values = [[1, 2, 4], [2, 4, 8]], [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    grid, mean = curves.over_time(clocks, values, count=3)
    np.testing.assert_allclose(grid, [2, 8**0.5, 4])
    np.testing.assert_allclose(mean, [1.0, 1 - (8**0.5 - 2) / 4, 0.5])
    assert curves.over_time(clocks, values, count=3, fold=np.max)[1].tolist() == [1.0, 1.0, 1.0]
    points = [{"x": 1}, {"x": 0.1234567, "y": 2.0}]
    assert curves.rounded(curves.columns(points)) == {"x": [1, 0.12346], "y": [None, 2.0]}


def test_figures_are_written_with_their_spread():
    assert tables.spread([1.0, 2.0], ".1f", ".2f") == "1.5 ± 0.71"
    assert tables.spread([1.0, float("nan")]) == "1 (1 of 2 never)"
    assert tables.spread([float("nan")]) == "never"
    assert tables.extent([1.0, 3.0]) == "2.00 (1.00 to 3.00)"
    assert tables.extent([2.0], "{:.1f}x") == "2.0x"
    text = "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n"
    assert tables.table(["a", "b"], [[1, "x|y"]]) == text
    assert tables.only(["a", "b"], ["a", "c", "b"], [[1, 2, "x|y"]]) == text


def test_what_a_page_has_no_place_for_is_its_details():
    page, parts = "{case[lr]:g}, {a}\n## more\n{b}\n", {"a": "x", "left": "y", "case": {"lr": 1}}
    assert tables.fill(page, parts) == "1, x\n"
    assert tables.details(page, parts) == "y"
