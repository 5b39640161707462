"""Hide what may be a secret in the settings of a run."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
# Words of a name in any case: wandb-key, WANDB_KEY, wandbKey.
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# The value of a setting is hidden if its name contains one of these.
SECRETS = re.compile(
    r"passw(or)?d|passphrase|passcode|secret(?!ar)|credential|(api|access|private|secret)_?key"
)
# A text is hidden if the name of its setting ends with one of these words.
SECRET_ENDINGS = {
    *("key", "keys", "token", "tokens", "auth", "authorization", "cookie", "pass", "pwd"),
}
# A name with one of these words is not a secret: loss-key, pad-token, public-key.
HARMLESS = {
    *("loss", "acc", "accuracy", "metric", "metrics", "weight", "weights", "weighted", "by"),
    *("arrayrecord", "configrecord", "metricrecord", "record", "num", "max", "min", "new", "per"),
    *("sort", "group", "label", "labels", "target", "column", "feature", "image", "text", "dict"),
    *("partition", "primary", "foreign", "index", "frame", "public", "special", "stop"),
    *("pad", "bos", "eos", "unk", "mask", "sep", "cls", "added", "extra"),
}
NUMBER = re.compile(r"true|false|[-+.\d]{1,7}")
# "user:password@" in an address.
URL = re.compile(r"(\w://)[^/?#\s]+@")
# "name=value" and "--name value" in a text, such as a command or the query of an address.
VALUE = r"""("[^"]*"|'[^']*'|(?:Bearer|Basic)\s+\S+|[^\s&;,"']+)"""
PAIR = re.compile(rf"""([\w.-]{{1,64}})(["']?\s*[=:]\s*){VALUE}""")
OPTION = re.compile(rf"""(--[\w.-]{{1,64}})(\s+){VALUE}""")


def is_secret(name: str, value: Any = "") -> bool:
    """Return whether a setting may hold a secret; most names hide texts but not numbers."""
    words = [word.lower() for word in WORDS.findall(name)]
    if SECRETS.search("_".join(words)):
        return True
    if value is None or isinstance(value, int | float) or NUMBER.fullmatch(str(value)):
        return False
    # The id of a key, such as access-key-id, is treated like the key.
    if len(words) > 1 and words[-1] == "id":
        words.pop()
    last = words[-1] if words else ""
    is_named_so = last in SECRET_ENDINGS or last.endswith(("token", "apikey"))
    return is_named_so and HARMLESS.isdisjoint(words[:-1])


def masked(value: Any, name: str = "") -> Any:
    """Hide everything in a plain value that may be a secret, also in tables and texts."""
    if value not in ("", None) and is_secret(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return _masked_text(value) if isinstance(value, str) else value


def _masked_text(text: str) -> str:
    text = URL.sub(rf"\1{HIDDEN}@", text)
    return PAIR.sub(_masked_pair, OPTION.sub(_masked_pair, text))


def _masked_pair(match: re.Match[str]) -> str:
    name, separator, value = match.groups()
    unquoted = value.strip("\"'")
    if is_secret(name, unquoted):
        return f"{name}{separator}{HIDDEN}"
    # The value may contain pairs itself, as that of --run-config does.
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{separator}{quote}{_masked_text(unquoted)}{quote}"
