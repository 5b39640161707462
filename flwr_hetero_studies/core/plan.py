"""Parts of plans: trials to run, the options of a plan, and its data."""

import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flwr_hetero.errors import check_count
from flwr_hetero_studies.core.record import Case, key_of

DIGITS = "digits"
EMBEDDED = {"images": DIGITS, "texts": "stdlib", "series": "series", "numbers": "breast-cancer"}
"""Data that need no download, by kind."""
T = TypeVar("T")


class NotHereError(Exception):
    """Raised by a run that this machine cannot make; its text says what is missing."""


@dataclass(frozen=True)
class Trial:
    """One run of a study, which its case and a seed identify in the record.

    ``given`` follows from other runs, such as a time budget, and does not identify the run. A run
    that measures time or memory is ``alone``: no other one runs at the same time.
    """

    case: Case
    seed: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def key(self) -> str:
        return key_of({"case": self.case, "seed": self.seed})

    @property
    def label(self) -> str:
        return f"{self.case['experiment']}/{self.case['name']}"


@dataclass(frozen=True)
class Data:
    """A data set, as in ``dataset`` of the apps, and a folder for parts of it."""

    source: str
    scratch: str

    @property
    def name(self) -> str:
        return Path(self.source).name

    def first(self, train: int, test: int) -> str:
        """Write the first rows of a Parquet folder to a folder; other data are returned as is."""
        folder = Path(self.source).expanduser()
        if not folder.is_dir():
            return self.source
        # The command line works without this extra.
        import pyarrow.parquet as pq

        # Another process finds the folder by its name.
        part = Path(self.scratch) / f"{self.name}-{train}-{test}"
        if not part.exists():
            # Write elsewhere and rename, so that no process reads half a file.
            new = Path(tempfile.mkdtemp(dir=self.scratch))
            for split, rows in (("train", train), ("test", test)):
                (file,) = folder.glob(f"{split}*.parquet")
                pq.write_table(pq.read_table(file).slice(0, rows), new / f"{split}.parquet")
            try:
                new.rename(part)
            # Another process was faster.
            except OSError:
                shutil.rmtree(new)
        return str(part)


@dataclass(frozen=True)
class Options:
    """Options of a plan or of a paper's figure."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""
    seeds: Sequence[int] | None = None
    fast: bool = False

    def __post_init__(self) -> None:
        for seed in self.seeds or ():
            check_count("seed", seed)

    @property
    def seed(self) -> int:
        return self.seeds_or([0])[0]

    def seeds_or(self, usual: Iterable[int]) -> list[int]:
        """Return the seeds asked for, else the usual ones, of which a fast run has one."""
        return list(self.seeds or ([0] if self.fast else usual))

    def pick(self, fast: T, full: T) -> T:
        return fast if self.fast else full

    def dataset(self, kind: str) -> str:
        """Return the data that were given, else those of a kind that need no download."""
        return self.data or EMBEDDED[kind]

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
