"""Texts of pages: figures with their spread, Markdown tables, templates."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import mean, stdev
from string import Formatter


def spread(values: Sequence[float], form: str = ".3g", deviation: str = ".2g") -> str:
    """Write a mean ± standard deviation; infinite values are targets that were never reached."""
    known = [value for value in values if isfinite(value)]
    if not known:
        return "never"
    text = f"{mean(known):{form}}" + (f" ± {stdev(known):{deviation}}" if len(known) > 1 else "")
    # Runs that never reach a target are counted, not averaged.
    missed = len(values) - len(known)
    return text + (f" ({missed} of {len(values)} never)" if missed else "")


def extent(values: Sequence[float], form: str = "{:.2f}") -> str:
    text = form.format(mean(values))
    if len(values) == 1:
        return text
    return f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    every = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", r"\|") for cell in row] for row in every)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def only(wanted: Sequence[str], head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write some columns of a table."""
    places = [head.index(name) for name in wanted]
    return table(wanted, ([row[place] for place in places] for row in rows))


def fields(page: str) -> set[str]:
    return {re.split(r"[.[]", field)[0] for _, field, *_ in Formatter().parse(page) if field}


def fill(page: str, parts: Mapping[str, object]) -> str:
    """Fill a page's ``{parts}``, and leave out sections for which a part is missing."""
    sections = re.split(r"(?m)^(?=## )", page)
    return "".join(each.format(**parts) for each in sections if fields(each) <= parts.keys())


def details(page: str, parts: Mapping[str, object]) -> str:
    """Return the texts among the parts for which a page has no place."""
    left = {name: text for name, text in parts.items() if name not in fields(page)}
    return "\n".join(text for text in left.values() if isinstance(text, str))
