"""The parts of a run's page around its figures and tables: heading, facts, settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_hetero.report.history import History
from flwr_hetero.report.markup import Content, Html, element, table
from flwr_hetero.report.summary import summary

NOTHING = Html()


def card(title: str, *content: Content) -> Html:
    """Make a box with a heading.

    Parameters
    ----------
    title : str
        The heading.
    *content : str or Html
        What is below it.

    Returns
    -------
    Html
        The box.
    """
    return element("section", element("h2", title), *content, class_="card")


def header_part(folder: Path, config: Mapping[str, Any]) -> Html:
    """Say which run this is.

    Parameters
    ----------
    folder : Path
        Run directory.
    config : mapping
        Of ``config.json``.

    Returns
    -------
    Html
        The top of the page.
    """
    started = str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC")
    said = [f"Started {started}"] if started else []
    if times := len(config.get("resumed") or ()):
        said.append(f"resumed {times} times" if times > 1 else "resumed once")
    return element(
        "header",
        element("p", "flwr-hetero run", class_="kind"),
        element("h1", folder.name),
        element("p", ", ".join([*said, str(folder)]), class_="where"),
    )


def facts_part(history: History, config: Mapping[str, Any]) -> Html:
    """Show the most important figures.

    Parameters
    ----------
    history : History
        A run with at least one round.
    config : mapping
        Of ``config.json``.

    Returns
    -------
    Html
        A grid of boxes.
    """
    cards = [
        element(
            "div",
            element("p", fact.label, class_="label"),
            element("p", fact.value, class_="value"),
            element("p", fact.note, class_="note"),
            class_="card" if number else "card first",
        )
        for number, fact in enumerate(summary(history, config.get("settings")))
    ]
    return element("div", *cards, class_="facts")


def notes_part(notes: Sequence[str]) -> Html:
    """Show what the reader of the history had to pass over.

    Parameters
    ----------
    notes : sequence of str
        For people.

    Returns
    -------
    Html
        A box; nothing without notes.
    """
    if not notes:
        return NOTHING
    return element("div", *(element("p", note) for note in notes), class_="card warning")


def settings_part(config: Mapping[str, Any]) -> Html:
    """Show settings, versions and command.

    Parameters
    ----------
    config : mapping
        Of ``config.json``.

    Returns
    -------
    Html
        Two boxes; nothing if nothing is known.
    """
    settings = {**(config.get("settings") or {})}
    ground = {**(config.get("versions") or {})}
    ground |= {key: config[key] for key in ("python", "platform", "command") if key in config}
    boxes = [
        card(title, table((), [(key, _value(value)) for key, value in facts.items()]))
        for title, facts in (("Settings", settings), ("Made with", ground))
        if facts
    ]
    return element("div", *boxes, class_="pair") if boxes else NOTHING


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not set" if value in (None, "") else str(value)
