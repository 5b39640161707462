"""Keep Flower's log short."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors(least: int = logging.ERROR) -> Iterator[None]:
    """Log errors alone, or what is at least of a level."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(least)
    try:
        yield
    finally:
        logger.setLevel(level)
