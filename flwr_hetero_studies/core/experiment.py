"""Experiments of the papers, and what is found in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero_studies.core.criteria import (
    CONSTRUCTION,
    NOT,
    PAIRS,
    REPRODUCED,
    SIZE,
    UNTESTED,
    Claim,
)
from flwr_hetero_studies.core.plan import Options

PAPERS = ("tifl", "biased-local-sgd", "cd-grab", "mercury", "pgd")
CLAIMS = ("claim", "paper", "here", "verdict")
PARTLY = "partly"
NOT_RUN = "not run"
DIFFERS = "differs from the paper"
WHY = "why"


def together(verdicts: Sequence[str]) -> str:
    """Return the verdict of a figure, by the claims that were tested and can fail."""
    tested = [each for each in verdicts if each not in (CONSTRUCTION, UNTESTED)]
    if not tested:
        return next(each for each in (UNTESTED, CONSTRUCTION) if each in verdicts)
    if len({*tested}) == 1:
        return tested[0]
    return PARTLY if NOT in tested else SIZE


class Curve(NamedTuple):
    """Measurements by cost."""

    x: Sequence[float]
    y: Sequence[float]

    def at(self, x: float) -> float:
        return float(np.interp(x, self.x, self.y))


@dataclass(frozen=True)
class Finding:
    """Our table beside the paper's numbers, and the claims that it decides."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    claims: Sequence[Claim]

    @property
    def verdict(self) -> str:
        return together([claim.verdict for claim in self.claims])

    @property
    def parts(self) -> dict[str, Any]:
        claims = [claim._asdict() for claim in self.claims]
        rows = [[plain(cell) for cell in row] for row in self.rows]
        metrics = {"verdict": self.verdict, "claims": claims, "head": [*self.head], "rows": rows}
        return {"metrics": metrics}


def plain(cell: Any) -> Any:
    return cell.item() if isinstance(cell, np.generic) else cell


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper; without ``run`` it is listed with the reason."""

    paper: str
    name: str
    title: str
    run: Callable[[Options], Finding] | None = None
    differs: str = ""
    """How it differs from the paper, also in the full form."""
    cut: str = ""
    """What ``--fast`` makes smaller."""
    why: str = ""
    """Why it is not run, or why a claim does not hold."""
    seeds: int = PAIRS
    """Number of seeds; one where nothing is random."""

    def notes(self, verdict: str, *, fast: bool) -> dict[str, str]:
        texts = {
            DIFFERS: self.differs,
            "--fast": self.cut if fast else "",
            WHY: self.why if verdict not in (REPRODUCED, CONSTRUCTION) else "",
        }
        return {name: text for name, text in texts.items() if text}
