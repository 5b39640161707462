"""Settings of strategies, which are fixed, and hooks, which may not be misspelt."""

import inspect
from abc import ABCMeta
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from flwr_hetero.errors import shown

SIMILAR = 0.85
"""A new method is taken for a misspelt hook if the names are this similar; 1 means equal."""
BY_KEYWORD = frozenset({"start"})
"""Methods that users call with keywords, so that the order of their arguments is free."""


def _ours(kind: type) -> list[type]:
    """Return the class and its bases that have the metaclass below, the class itself first."""
    return [base for base in kind.__mro__ if isinstance(base, SettingNames)]


class SettingNames(ABCMeta):
    """Metaclass that knows the names of the settings, and when a constructor has ended."""

    setting_names: frozenset[str]
    """Names of all constructor arguments, those of the base classes included."""

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        constructors = [vars(kind)["__init__"] for kind in _ours(cls) if "__init__" in vars(kind)]
        parameters = [
            parameter
            for constructor in constructors
            for parameter in inspect.signature(constructor).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        cls.setting_names = frozenset(parameter.name for parameter in parameters) - {"self"}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a strategy, whose settings are fixed from now on."""
        strategy = super().__call__(*args, **kwargs)
        vars(strategy)["_is_built"] = True
        return strategy


class FixedSettings(metaclass=SettingNames):
    """Base class of strategies whose settings cannot be changed once they are constructed.

    A setting is an argument of the constructor, which stores it under its name. All other
    attributes may change, but a new attribute can only be added by a hook, during a run.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a misspelt hook, and a hook that cannot be called."""
        super().__init_subclass__(**kwargs)
        _check_hooks(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; AttributeError for a setting, or for an unknown name."""
        if "_is_built" in vars(self):
            _check_assignment(self, name, value)
        super().__setattr__(name, value)


class FleetSetting:
    """A setting that the fleet stores, so that all wrappers around a strategy share it."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.fleet, self.name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper.fleet, self.name, self.check(value))


def _check_assignment(strategy: Any, name: str, value: Any) -> None:
    kind = type(strategy)
    label = strategy.called or kind.__name__
    if name in kind.setting_names:
        raise AttributeError(
            f"{label}.{name} is a setting, and settings are fixed once a strategy is made. "
            f"Make a new strategy instead: {label}({name}={shown(value)})."
        )
    if name in vars(strategy) or hasattr(kind, name) or strategy.fleet.is_running:
        return
    owners = [each for each in strategy.chain()[1:] if name in {*dir(type(each)), *vars(each)}]
    close = get_close_matches(name, [*kind.setting_names, *vars(strategy)], n=1)
    if owners:
        inside = getattr(owners[0], "called", "") or type(owners[0]).__name__
        hint = f"It belongs to {inside}: set it there, before that is wrapped."
    elif close:
        hint = f"Did you mean {close[0]}?"
    else:
        hint = "An attribute of your own must be set in __init__ first."
    raise AttributeError(f"{label} has no attribute {name!r} that could be set. {hint}")


def _check_hooks(kind: type) -> None:
    """Refuse with TypeError a new method that the loop would not, or could not, call."""
    bases = _ours(kind)[1:]
    inherited = {
        name: method
        for base in bases
        for name, method in vars(base).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    hooks = [name for name in inherited if "_" in name]
    for name, method in vars(kind).items():
        if not inspect.isfunction(method) or name.startswith("_") or name in BY_KEYWORD:
            continue
        if name in inherited:
            _check_signature(kind, method, inherited[name])
            continue
        for close in get_close_matches(name, hooks, n=1, cutoff=SIMILAR):
            raise TypeError(
                f"{kind.__name__}.{name} is not a hook and would never be called: did you mean "
                f"{close}? If not, give it another name, or a leading underscore."
            )


def _check_signature(kind: type, method: Any, inherited: Any) -> None:
    """Refuse a method that cannot be called with the arguments of the one that it overrides."""
    parameters = inspect.signature(inherited).parameters.values()
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(method).bind(*by_position, **by_name)
    except TypeError as error:
        raise TypeError(
            f"{kind.__name__}.{method.__name__} is called with "
            f"({', '.join([*by_position[1:], *by_name])}): {error}."
        ) from None
