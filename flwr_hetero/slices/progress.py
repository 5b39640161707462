"""How much of a run is over, also where ``start`` is called for a few rounds at a time."""

from logging import INFO

from flwr_hetero._flwr import log
from flwr_hetero.server.loop import Run

UNKNOWN_LENGTH = (
    "FedSlice: start goes on with an earlier run and does not say how long training is in all. "
    "Slices become equal in steps only with FedSlice(total_rounds=...)"
)


class Progress:
    """Rounds that are over, of those of all calls of ``start``.

    >>> progress = Progress(total_rounds=4)
    >>> progress.ends_round(part_of_next=0.5)
    >>> progress.done
    0.375
    """

    def __init__(self, total_rounds: int | None) -> None:
        self.total_rounds = total_rounds
        # None: unknown
        self.rounds: int | None = total_rounds
        self.rounds_done = 0
        self.part = 0.0
        self._said = set[str]()

    def begin(self, run: Run) -> None:
        """Learn how many rounds there are."""
        if run.round < 0 and not run.continues:
            self.rounds_done = 0
            self.part = 0.0
        self.rounds = self.total_rounds or (None if run.continues else run.num_rounds)
        if self.rounds is None:
            self.say_once(UNKNOWN_LENGTH)

    def say_once(self, text: str) -> None:
        """Log why slices do not become equal in steps, the first time only."""
        if text not in self._said:
            self._said.add(text)
            log(INFO, text)

    def ends_round(self, part_of_next: float) -> None:
        """Learn that a round is over, and how much of the next one was trained with it."""
        self.rounds_done += 1
        self.part = part_of_next

    @property
    def done(self) -> float:
        """The part of training that is over; 0 where its length is unknown."""
        return min(1.0, (self.rounds_done + self.part) / self.rounds) if self.rounds else 0.0
