"""Several runs on one axis, and what each needed to reach the target."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_hetero.report.compare import Comparison
from flwr_hetero.report.progress import CLOCKS
from flwr_hetero.report.style import WIDTH, metric_axis, round_axis, run_look, zoom
from flwr_hetero.report.units import duration, figure, heading, time_unit, words


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the runs against time and rounds, and below it the cost of the target.

    Parameters
    ----------
    comparison : Comparison
        What to draw.

    Returns
    -------
    Figure
        Three panels.
    """
    count = len(comparison.runs)
    bars_height = 0.9 + 0.36 * count
    drawn = Figure(figsize=(WIDTH, 4.1 + bars_height), layout="constrained")
    grid = drawn.add_gridspec(2, 2, height_ratios=[4.1, bars_height])
    by_time = drawn.add_subplot(grid[0, 0])
    by_round = drawn.add_subplot(grid[0, 1], sharey=by_time)
    cost = drawn.add_subplot(grid[1, :])
    _draw_runs(by_time, comparison, "wall_s" if comparison.clock == "wall_s" else "virtual_s")
    _draw_runs(by_round, comparison, "round")
    by_round.set_ylabel("")
    by_round.tick_params(labelleft=False)
    by_round.legend(loc="upper right" if comparison.falls else "lower right")
    _draw_costs(cost, comparison)
    return drawn


def cost_text(clock: str, cost: float) -> str:
    """Write what something cost by a clock.

    Parameters
    ----------
    clock : {"virtual_s", "wall_s", "round"}
        The clock.
    cost : float
        Seconds or rounds.

    Returns
    -------
    str
        With a unit.

    Examples
    --------
    >>> cost_text("round", 12.0), cost_text("virtual_s", 75.0)
    ('12 rounds', '1 min 15 s')
    """
    return f"{cost:.0f} rounds" if clock == "round" else duration(cost)


def _draw_runs(axes: Axes, comparison: Comparison, clock: str) -> None:
    times = {run.name: run.history.column(clock) for run in comparison.runs}
    longest = np.nanmax([np.nanmax(column, initial=0) for column in times.values()])
    unit = time_unit(float(longest))
    scale = 1.0 if clock == "round" else unit.seconds
    shown = []
    for number, run in enumerate(comparison.runs):
        x, values = times[run.name] / scale, run.history.metric(comparison.metric)
        known = ~np.isnan(values)
        axes.plot(x[known], values[known], **run_look(number), label=run.name)
        shown.append(values[known])
    axes.axhline(comparison.target, color="#8c8c8c", lw=1.2, ls=(0, (1, 1.5)))
    zoom(axes, np.concatenate(shown), falls=comparison.falls)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, comparison.target), max(high, comparison.target))
    metric_axis(axes, comparison.metric, np.concatenate([*shown, [comparison.target]]))
    name = CLOCKS[clock]
    axes.set_title(
        f"{heading(comparison.metric)} against {'rounds' if clock == 'round' else 'time'}"
    )
    if clock == "round":
        round_axis(axes)
    else:
        axes.set_xlabel(f"{name} ({unit.symbol})")


def _draw_costs(axes: Axes, comparison: Comparison) -> None:
    costs = [row.to_target for row in comparison.rows]
    longest = max((cost for cost in costs if cost is not None), default=0.0)
    unit = time_unit(longest)
    scale = 1.0 if comparison.clock == "round" else unit.seconds
    for number, row in enumerate(comparison.rows):
        cost = row.to_target
        colour = run_look(number)["color"]
        axes.barh(number, 0 if cost is None else cost / scale, color=colour, height=0.7)
        text = "never" if cost is None else cost_text(comparison.clock, cost)
        if row.speed_up is not None and row.name != comparison.baseline:
            text += f", {row.speed_up:.3g} x {'faster' if row.speed_up >= 1 else 'the speed'}"
        place = (0 if cost is None else cost / scale, number)
        axes.annotate(text, place, (6, 0), textcoords="offset points", va="center", size=9.5)
    axes.set_yticks(range(len(costs)), [row.name for row in comparison.rows])
    axes.set_ylim(len(costs) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * longest / scale if longest else 1)
    axes.grid(visible=False, axis="y")
    target = figure(comparison.metric, comparison.target)
    name = CLOCKS[comparison.clock].capitalize()
    axes.set_title(f"{name} to reach {words(comparison.metric)} {target}")
    axes.set_xlabel("rounds" if comparison.clock == "round" else unit.symbol)
