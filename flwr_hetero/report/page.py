"""One self-contained HTML page that says what a run did."""

import base64
from importlib import resources
from pathlib import Path
from typing import Any

from flwr_hetero.report.files import HISTORY, REPORT, read_config, replace
from flwr_hetero.report.history import History, read_history
from flwr_hetero.report.markup import Html, element, void
from flwr_hetero.report.page_parts import (
    card,
    facts_part,
    header_part,
    notes_part,
    settings_part,
)
from flwr_hetero.report.page_tables import faults_part, rounds_part, tiers_part
from flwr_hetero.report.plots import Plot, plots_of, render
from flwr_hetero.report.style import DARK, LIGHT

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The page loads nothing and runs nothing; browsers enforce it."""


def write_report(directory: str | Path) -> Path:
    """Build ``report.html`` and the PNGs of a run.

    Parameters
    ----------
    directory : str or Path
        A run directory.

    Returns
    -------
    Path
        Absolute path of the page.

    Raises
    ------
    ValueError
        If there is no such directory, or no history in it.
    """
    folder = Path(directory).expanduser().absolute()
    history, config = read_history(folder), read_config(folder)
    figures = []
    for plot in plots_of(history):
        light, dark = (render(plot, history, theme) for theme in (LIGHT, DARK))
        if light is not None and dark is not None:
            replace(folder / f"{plot.name}.png", light)
            figures.append(_figure(plot, light, dark))
    replace(folder / REPORT, _page(folder, history, config, figures).encode())
    return folder / REPORT


def _page(folder: Path, history: History, config: dict[str, Any], figures: list[Html]) -> str:
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=POLICY),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{folder.name}: flwr-hetero run"),
        element("style", Html(css)),
    )
    body = element(
        "body",
        header_part(folder, config),
        element("main", *_main(history, config, figures)),
        element("footer", f"Made by flwr-hetero from {folder / HISTORY}. Works offline."),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _main(history: History, config: dict[str, Any], figures: list[Html]) -> list[Html]:
    if not history.rounds:
        notes = [*history.notes, "No round was completed: the log says why."]
        return [notes_part(notes), settings_part(config)]
    return [
        facts_part(history, config),
        notes_part(history.notes),
        *figures[:1],
        tiers_part(history),
        *figures[1:],
        faults_part(history),
        settings_part(config),
        rounds_part(history),
    ]


def _figure(plot: Plot, light: bytes, dark: bytes) -> Html:
    width, height = (int.from_bytes(light[at : at + 4], "big") for at in (16, 20))
    in_dark = void("source", media="(prefers-color-scheme: dark)", srcset=_inline(dark))
    image = void("img", src=_inline(light), width=width, height=height, alt=plot.heading)
    picture = element("picture", in_dark, image)
    return card(plot.heading, picture, element("p", plot.caption, class_="caption"))


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
