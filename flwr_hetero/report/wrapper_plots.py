"""Any figures that a wrapper puts into its section of the history, without code of its own."""

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flwr_hetero.report.fleet_facts import TIFL
from flwr_hetero.report.history import METRICS, History
from flwr_hetero.report.progress_plots import MAX_PANELS, small_panels
from flwr_hetero.report.style import BLUE, round_axis, run_look
from flwr_hetero.report.units import heading

MAX_LINES = 6
"""Longer lists are drawn as median and range."""
ROOM = 0.15
"""Height of a line of a legend, as a part of the panel, so that it covers no curve."""


class Fan(NamedTuple):
    """A key of a wrapper over the rounds: one number a round, or several.

    Parameters
    ----------
    key : str
        Name in the history.
    rounds : ndarray of float64, shape (num_rounds,)
        Rounds that have it.
    labels : list of str, length width
        What the numbers of a round stand for: positions in a list, keys of a dict.
    values : ndarray of float64, shape (num_rounds, width)
        NaN where a round has no such number.
    """

    key: str
    rounds: NDArray[np.float64]
    labels: list[str]
    values: NDArray[np.float64]

    @property
    def is_wide(self) -> bool:
        """Whether a line for each number would be too many."""
        return len(self.labels) > MAX_LINES


def wrappers_of(history: History) -> list[str]:
    """Return the sections of a history that have something to draw here.

    Parameters
    ----------
    history : History
        A run.

    Returns
    -------
    list of str
        Names of wrappers; TiFL has plots of its own.
    """
    own = (*METRICS, TIFL)
    return [name for name in history.sections() if name not in own and fans(history, name)]


def fans(history: History, section: str) -> list[Fan]:
    """Collect the numeric figures of a wrapper.

    Parameters
    ----------
    history : History
        A run.
    section : str
        Name of the wrapper.

    Returns
    -------
    list of Fan
        One per key that holds a number, a list of numbers or a dict of numbers.

    Examples
    --------
    >>> record = {"round": 1, "cd-grab": {"bound": 3.0, "steps": {"node-0": 4, "node-1": 2}}}
    >>> [(fan.key, fan.values.tolist()) for fan in fans(History((record,)), "cd-grab")]
    [('bound', [[3.0]]), ('steps', [[4.0, 2.0]])]
    """
    found: dict[str, dict[int, dict[str, float]]] = {}
    for record in history.rounds:
        for key, value in (record.get(section) or {}).items():
            if numbers := _numbers(value):
                found.setdefault(key, {})[record["round"]] = numbers
    return [_fan(key, rows) for key, rows in found.items()]


def draw_wrapper(history: History, section: str) -> Figure | None:
    """Draw the figures of a wrapper against rounds, a small panel each.

    Parameters
    ----------
    history : History
        A run.
    section : str
        Name of the wrapper.

    Returns
    -------
    Figure or None
        None if it has no numeric figures.
    """
    if not (shown := fans(history, section)[:MAX_PANELS]):
        return None
    drawn, axes = small_panels(len(shown))
    for axis, fan in zip(axes, shown, strict=True):
        _draw_fan(axis, fan)
        axis.set_title(heading(fan.key) + (" (median, range)" if fan.is_wide else ""))
        round_axis(axis)
    return drawn


def _draw_fan(axes: Axes, fan: Fan) -> None:
    marker = "o" if len(fan.rounds) <= 30 else ""
    if fan.is_wide:
        low, middle, high = np.nanpercentile(fan.values, (0, 50, 100), axis=1)
        axes.fill_between(fan.rounds, low, high, color=BLUE, alpha=0.2, lw=0)
        axes.plot(fan.rounds, middle, color=BLUE, marker=marker, markersize=3)
        return
    for number, (label, column) in enumerate(zip(fan.labels, fan.values.T, strict=True)):
        look = run_look(number)
        axes.plot(fan.rounds, column, **look, marker=marker, markersize=3, label=label)
    if len(fan.labels) > 1:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + ROOM * (top - bottom) * -(-len(fan.labels) // 2))
        axes.legend(loc="upper right", ncols=2, handlelength=1, columnspacing=1)


def _fan(key: str, rows: dict[int, dict[str, float]]) -> Fan:
    labels = list(dict.fromkeys(label for row in rows.values() for label in row))
    nan = float("nan")
    values = np.array([[row.get(label, nan) for label in labels] for row in rows.values()])
    return Fan(key, np.array(list(rows), np.float64), labels, values)


def _numbers(fact: Any) -> dict[str, float]:
    """Return the numbers in a fact; none if it holds anything else."""
    if isinstance(fact, list):
        fact = {str(position): item for position, item in enumerate(fact)}
    items = fact if isinstance(fact, dict) else {"": fact}
    known = {label: item for label, item in items.items() if item is not None}
    if not all(isinstance(item, int | float) for item in known.values()):
        return {}
    return {label: float(item) for label, item in known.items()}
