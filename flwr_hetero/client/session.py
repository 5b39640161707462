"""One call of a ClientApp's function: the session, and the torch objects made and stepped in it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from threading import Lock
from typing import Any

from flwr.app import Context, Message

from flwr_hetero.client.carried import Carried
from flwr_hetero.client.work import Work
from flwr_hetero.records import configs_in


class Session:
    """One call of a ClientApp's function, with a message and the node's context.

    Without a mod there is neither of them, and nothing continues in the next message.
    """

    def __init__(
        self,
        message: Message | None = None,
        context: Context | None = None,
        *,
        trains: bool = False,
    ) -> None:
        configs: Sequence[Mapping[str, Any]] = ()
        if message is not None and message.has_content():
            configs = list(configs_in(message.content).values())
        self.message: Any = message
        self.context: Any = context
        self.carried = Carried(configs, context, trains=trains)
        self.work = Work(configs, context, self.carried)
        # Samplers that were iterated, those that follow the server and answer it, and those that
        # hetero.batches made.
        self.iterated: list[Any] = []
        self.followers: list[Any] = []
        self.made: dict[Any, Any] = {}
        # Objects whose states are saved, by name, with the context that they are saved in.
        self.kept: dict[str, tuple[Any, Context]] = {}
        # Whether the function has saved a state itself.
        self.has_saved = False


CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)
current_session = CURRENT.get
"""Returns the session in which this code runs; None without one of our mods."""


class TorchWatch:
    """Tells sessions which torch objects are made and which optimizers step.

    Torch has no hook for new objects, so constructors are replaced while a message is answered.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_users = 0
        # The constructors that are replaced, by class; empty while nobody watches.
        self._constructors: dict[Any, Callable[..., None]] = {}
        self._hook: Any = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch torch, if it is loaded, until the last of several threads leaves."""
        with self._lock:
            self._num_users += 1
            self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._end()

    def _begin(self) -> None:
        torch: Any = sys.modules.get("torch")
        # A module that is still being imported lacks some of its parts.
        if self._constructors or not hasattr(torch, "optim") or not hasattr(torch, "amp"):
            return
        schedules = torch.optim.lr_scheduler
        watched = [torch.optim.Optimizer, schedules.LRScheduler, torch.amp.GradScaler]
        # These do not call the constructor of their parent.
        watched += [schedules.SequentialLR, schedules.ChainedScheduler]
        watched += [torch.optim.swa_utils.AveragedModel]
        for kind in watched:
            self._constructors[kind] = kind.__init__
            kind.__init__ = _noting(kind.__init__)
        register = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook
        self._hook = register(_before_step)

    def _end(self) -> None:
        for kind, constructor in self._constructors.items():
            kind.__init__ = constructor
        if self._constructors:
            self._hook.remove()
        self._constructors = {}


@lru_cache(maxsize=16)
def _noting(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that passes what it has made to the current session."""

    @wraps(constructor)
    def init(self: Any, *args: Any, **options: Any) -> None:
        constructor(self, *args, **options)
        session = current_session()
        if session is not None:
            session.carried.note(self)

    return init


def _before_step(optimizer: Any, _args: object, _kwargs: object) -> None:
    """Pass an optimizer to the current session; torch calls this before each step."""
    session = current_session()
    if session is not None:
        session.carried.before_step(optimizer, session.work.allotted)
        session.work.optimizer_steps(optimizer)


TORCH_WATCH = TorchWatch()
