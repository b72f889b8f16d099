"""Messages that are logged once in a process, though every batch, copy or task would repeat them."""

import logging
from functools import cache


@cache
def log_once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log a message, unless this logger has logged it before."""
    logger.log(level, message)
