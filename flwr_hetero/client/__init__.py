"""What every node shares."""

import logging

MOD = "add to the ClientApp: from flwr_hetero.mod import hetero; app = ClientApp(mods=[hetero])"
"""Hint for users whose ClientApp has no mod of this package."""
_warned: set[str] = set()


def warn_once(text: str, topic: str = "") -> None:
    """Log a warning unless this process has already logged this text, or one on the topic."""
    topic = topic or text
    if topic not in _warned:
        _warned.add(topic)
        logging.getLogger("flwr").warning(text)
