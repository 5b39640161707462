"""Settings as they are kept: what may be a secret is hidden."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""Words of a name in any case: ``wandb-key``, ``WANDB_KEY``, ``wandbKey``."""
SECRETS = re.compile(
    r"passw(or)?d|passphrase|passcode|secret(?!ar)|credential|(api|access|private|secret)_?key"
)
"""Parts of a name whose value is hidden, whatever it is."""
LAST = {"key", "keys", "token", "tokens", "auth", "authorization", "cookie", "pass", "pwd"}
"""Last words of a name whose text is hidden: ``num-tokens``, ``passes``, ``author`` have none."""
NAMES = {
    *("loss", "acc", "accuracy", "metric", "metrics", "weight", "weights", "weighted", "by"),
    *("arrayrecord", "configrecord", "metricrecord", "record", "num", "max", "min", "new", "per"),
    *("sort", "group", "label", "labels", "target", "column", "feature", "image", "text", "dict"),
    *("partition", "primary", "foreign", "index", "frame", "public", "special", "stop"),
    *("pad", "bos", "eos", "unk", "mask", "sep", "cls", "added", "extra"),
}
"""Words beside them by which it is no secret: ``loss-key``, ``pad-token``, ``public-key``."""
NUMBER = re.compile(r"true|false|[-+.\d]{1,7}")
URL = re.compile(r"(\w://)[^/?#\s]+@")
"""``user:password@`` of an address."""
VALUE = r"""("[^"]*"|'[^']*'|(?:Bearer|Basic)\s+\S+|[^\s&;,"']+)"""
PAIR = re.compile(rf"""([\w.-]{{1,64}})(["']?\s*[=:]\s*){VALUE}""")
OPTION = re.compile(rf"""(--[\w.-]{{1,64}})(\s+){VALUE}""")
"""``name=value`` and ``--name value`` in a text, such as a command or the query of an address."""


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether a setting may hold a secret; a number or a switch does by few names only."""
    words = [word.lower() for word in WORDS.findall(name)]
    if SECRETS.search("_".join(words)):
        return True
    if value is None or isinstance(value, int | float) or NUMBER.fullmatch(str(value)):
        return False
    # access-key-id
    *others, last = words[:-1] if words[1:] and words[-1] == "id" else words or [""]
    is_one = last in LAST or last.endswith(("token", "apikey"))
    return is_one and NAMES.isdisjoint(others)


def masked(value: Any, name: str = "") -> Any:
    """Return a plain value with all that may be a secret hidden, also in tables and texts."""
    if value not in ("", None) and is_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return _masked_text(value) if isinstance(value, str) else value


def _masked_text(text: str) -> str:
    text = URL.sub(rf"\1{HIDDEN}@", text)
    return PAIR.sub(_mask_pair, OPTION.sub(_mask_pair, text))


def _mask_pair(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    plain = value.strip("\"'")
    if is_secret(name, plain):
        return f"{name}{between}{HIDDEN}"
    # it may hold pairs of its own, as --run-config has them
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{_masked_text(plain)}{quote}"
