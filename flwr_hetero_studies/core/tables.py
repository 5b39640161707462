"""Texts of pages: figures with their spread, Markdown tables, templates."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import mean, stdev
from string import Formatter


def spread(values: Sequence[float], form: str = ".3g", deviation: str = ".2g") -> str:
    """Write a mean ± standard deviation; values that are not finite never came about."""
    known = [value for value in values if isfinite(value)]
    if not known:
        return "never"
    text = f"{mean(known):{form}}" + (f" ± {stdev(known):{deviation}}" if len(known) > 1 else "")
    # runs that never get there are counted, not averaged
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
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in every)


def fill(page: str, parts: Mapping[str, object]) -> str:
    """Fill a page's ``{parts}``; a section that names one which is not there is left out."""

    def known(section: str) -> bool:
        fields = [field for _, field, *_ in Formatter().parse(section) if field]
        return all(re.split(r"[.[]", field)[0] in parts for field in fields)

    # a page of a few cases has only the sections that they fill
    sections = re.split(r"(?m)^(?=## )", page)
    return "".join(section.format(**parts) for section in sections if known(section))
