"""Which wrappers go together, and in which order."""

from typing import TYPE_CHECKING

from flwr_hetero.core.errors import invalid

if TYPE_CHECKING:
    from flwr_hetero.strategy.wrapper import Wrapper

GRADIENT_ONLY = frozenset({"steps", "orders"})
"""Decisions about gradient steps, of which boosted trees take none."""


def check_nest(wrapper: "Wrapper") -> None:
    """Refuse a wrapper around strategies that it does not go with.

    The rules are read from three attributes of :class:`~flwr_hetero.strategy.Wrapper`, so that
    they hold for wrappers of other packages too: ``decides``, ``outside_of``, ``outermost``.

    Parameters
    ----------
    wrapper : Wrapper
        New; what it wraps has been checked before.

    Raises
    ------
    ValueError
        Names the wrapper inside that does not fit, and the reason.

    Examples
    --------
    >>> from flwr_hetero.strategy import AdaComm, FedNova, OverSelect, TiFL
    >>> OverSelect(TiFL(AdaComm())).leaf.__class__.__name__
    'FedAvg'
    >>> FedNova(AdaComm())
    Traceback (most recent call last):
    ...
    ValueError: strategy must leave steps to FedNova, got 'AdaComm': use one of the two.
    >>> TiFL(OverSelect())
    Traceback (most recent call last):
    ...
    ValueError: strategy must not be OverSelect, ...: write OverSelect(TiFL(...)).
    """
    me = type(wrapper).__name__
    for inner in wrapper.wrappers()[1:]:
        name = type(inner).__name__
        if both := wrapper.decides & inner.decides:
            rule = f"leave {' and '.join(sorted(both))} to {me}"
            raise invalid("strategy", name, rule, "use one of the two")
        early = inner.outside_of & wrapper.decides
        if early or inner.outermost:
            whom = f"whoever decides on {' and '.join(sorted(early))}" if early else "all others"
            rule = f"not be {name}, whose place is outside {whom}"
            raise invalid("strategy", name, rule, f"write {name}({me}(...))")
    leaf = type(wrapper.leaf).__name__
    if leaf.startswith("FedXgb") and wrapper.decides & GRADIENT_ONLY:
        rule = f"train by gradient steps inside {me}"
        raise invalid("strategy", leaf, rule, f"leave {me} out: boosted trees take no such steps")
