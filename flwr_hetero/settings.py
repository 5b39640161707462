"""What a strategy refuses: a setting that is changed later, and a hook that is misspelt."""

import inspect
from abc import ABCMeta
from difflib import get_close_matches
from typing import Any

from flwr_hetero.errors import shown

SIMILAR = 0.85
"""A new method whose name is this similar to the name of a hook is a misspelt hook."""
BY_KEYWORD = frozenset({"start"})
"""Methods that users call, with keywords: their signature is not checked."""


class FixedSettings(ABCMeta):
    """The class of strategies whose constructor arguments cannot be changed later."""

    setting_names: frozenset[str]
    """Names of all constructor arguments, those of the base classes included."""

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cls.setting_names = frozenset(
            name
            for base in cls.__mro__
            if isinstance(base, FixedSettings) and "__init__" in vars(base)
            for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
            if name != "self"
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct a strategy; from now on its settings are fixed."""
        strategy = super().__call__(*args, **kwargs)
        vars(strategy)["_is_built"] = True
        return strategy


def check_assignment(strategy: Any, name: str, value: Any) -> None:
    """Refuse to change a setting, or to add an attribute while no run is in progress.

    Raises
    ------
    AttributeError
        The text says what to do instead.
    """
    kind, known = type(strategy), vars(strategy)
    if "_is_built" not in known:
        return
    label = strategy.called or kind.__name__
    if name in kind.setting_names:
        raise AttributeError(
            f"{label}.{name} is a setting, and settings are fixed once a strategy is made. "
            f"Make a new strategy instead: {label}({name}={shown(value)})."
        )
    # Hooks may add attributes during a run.
    if name in known or hasattr(kind, name) or strategy.fleet.is_running:
        return
    text = f"{label} has no attribute {name!r} that could be set"
    owner = next((each for each in strategy.chain()[1:] if name in vars(each)), None)
    close = get_close_matches(name, kind.setting_names | known.keys(), n=1)
    if owner is not None:
        text += f": it is a setting of {type(owner).__name__}. Set it where that one is made"
    elif close:
        text += f": did you mean {close[0]!r}?"
    raise AttributeError(f"{text}.".replace("?.", "?"))


def check_hooks(kind: type, base: type) -> None:
    """Check the methods of a new class against the hooks that it inherits.

    ``base`` is the class whose public methods the loop calls by position.

    Raises
    ------
    TypeError
        For a method whose name is nearly that of a hook, or a hook with another signature.
    """
    inherited = {
        name
        for each in kind.__mro__[1:]
        if isinstance(each, FixedSettings)
        for name, method in vars(each).items()
        if inspect.isfunction(method) and "_" in name.strip("_") and not name.startswith("_")
    }
    for name, method in vars(kind).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        hook = vars(base).get(name)
        if inspect.isfunction(hook) and name not in BY_KEYWORD:
            _check_signature(kind, method, hook)
        if not any(hasattr(each, name) for each in kind.__mro__[1:]):
            for close in get_close_matches(name, inherited, n=1, cutoff=SIMILAR):
                raise TypeError(
                    f"{kind.__name__}.{name} is not called by anything: did you mean the hook "
                    f"{close}? If not, give the method another name, or a leading underscore."
                )


def _check_signature(kind: type, method: Any, hook: Any) -> None:
    """Refuse a method that cannot be called with the positional arguments of the hook."""
    expected = inspect.signature(hook)
    try:
        inspect.signature(method).bind(*expected.parameters)
    except TypeError as error:
        names = ", ".join(expected.parameters)
        text = f"{kind.__name__}.{method.__name__} must take the arguments ({names}): {error}."
        raise TypeError(text) from None
