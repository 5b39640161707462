"""What an experiment of a paper is, what it claims and what we find."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flwr_hetero_studies.core.plan import Options

PAPERS = ("tifl", "biased-local-sgd", "cd-grab", "mercury", "pgd")
CLAIMS = ("claim", "paper", "here", "")
REPRODUCED, PARTLY, NOT, NOT_RUN = "reproduced", "partly", "not reproduced", "not run"
ENOUGH = 2 / 3
"""Share of a paper's factor from which ours counts as that factor."""


class Claim(NamedTuple):
    """One sentence of the paper, and whether it holds here."""

    text: str
    published: str
    found: str
    holds: bool

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.text, self.published, self.found, "holds" if self.holds else "does not hold"


def times(text: str, published: float, found: float) -> Claim:
    """Claim a factor: two thirds of the paper's count, for testbeds differ; 0 stands for never."""
    holds, value = found >= ENOUGH * published, f"{found:.1f}x" if found else "never"
    return Claim(f"{text} (at least 2/3 of it)", f"{published:g}x", value, holds)


class Curve(NamedTuple):
    """What was measured, by what it took."""

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
        # a claim may be a NumPy bool, which adds as a number
        held = sum(claim.holds for claim in self.claims)
        return REPRODUCED if held == len(self.claims) else PARTLY if held else NOT

    @property
    def parts(self) -> dict[str, Any]:
        claims = [claim._asdict() | {"holds": bool(claim.holds)} for claim in self.claims]
        rows = [[plain(cell) for cell in row] for row in self.rows]
        metrics = {"verdict": self.verdict, "claims": claims, "head": [*self.head], "rows": rows}
        return {"metrics": metrics}


def plain(cell: Any) -> Any:
    return cell.item() if isinstance(cell, np.generic) else cell


@dataclass(frozen=True)
class Experiment:
    """A figure or table of a paper; without ``run`` it is listed with the reason why not."""

    paper: str
    name: str
    title: str
    run: Callable[[Options], Finding] | None = None
    differs: str = ""
    """What is other than in the paper, also in the full form."""
    cut: str = ""
    """What ``--fast`` makes smaller besides."""
    why: str = ""
    """Why it is not run, or why a claim does not hold."""

    def notes(self, verdict: str, *, fast: bool) -> dict[str, str]:
        texts = {
            "differs from the paper": self.differs,
            "--fast": self.cut if fast else "",
            "why": self.why if verdict != REPRODUCED else "",
        }
        return {name: text for name, text in texts.items() if text}
