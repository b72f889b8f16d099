"""`sens COMMAND`: each command is a function in its own file, whose arguments are the command's options."""

from __future__ import annotations

import inspect
import logging
import math
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from structured_ensembles.cli.command_line import parse_words
from structured_ensembles.cli.continual import continual
from structured_ensembles.cli.demo import demo
from structured_ensembles.cli.evaluate import evaluate
from structured_ensembles.cli.export import export
from structured_ensembles.cli.failures import REFUSED, STOPPED, run_guarded
from structured_ensembles.cli.help import format_command_help, format_program_help
from structured_ensembles.cli.lists import datasets, models
from structured_ensembles.cli.options import read_options
from structured_ensembles.cli.predict import predict
from structured_ensembles.cli.printing import printable_lines
from structured_ensembles.cli.report import report
from structured_ensembles.cli.reproduce import reproduce
from structured_ensembles.cli.threads import threads_for_work
from structured_ensembles.cli.train import train
from structured_ensembles.cli.user_code import check_code, search_current_folder
from structured_ensembles.cli.values import suggest
from structured_ensembles.common.version import VERSION

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "reproduce": reproduce,
    "report": report,
    "export": export,
    "continual": continual,
    "models": models,
    "datasets": datasets,
}
SMALL = (demo,)  # commands whose networks are faster on one thread; train and continual look at theirs
HELP = ("--help", "-h")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a failure prints a sentence, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _plain_output(), _stopped_by_termination():
        code = run_guarded(lambda: _run(words), words)
    if (
        code == STOPPED and arguments is None
    ):  # the program ends: a second Ctrl-C would print a traceback of Python's end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(words: Sequence[str]) -> int:
    """Parse a command line and run its command, or show help or versions."""
    if not words:
        print(format_program_help(COMMANDS), file=sys.stderr)
        return REFUSED
    name, *rest = words
    if name in HELP:
        print(format_program_help(COMMANDS))
        return 0
    if name == "--version":
        print(f"structured-ensembles {VERSION}, torch {torch.__version__}, Python {platform.python_version()}")
        return 0
    if name not in COMMANDS:
        raise ValueError(
            f"there is no command {name!r}{suggest(name, COMMANDS) or ':'} the commands are {', '.join(COMMANDS)}"
        )
    if set(HELP) & set(rest[: rest.index("--")] if "--" in rest else rest):
        print(format_command_help(name, COMMANDS[name]))
        return 0
    return _run_command(name, rest)


def _run_command(name: str, words: Sequence[str]) -> int:
    """Parse the words after a command and call its function."""
    options = parse_words(name, words, read_options(COMMANDS[name]))
    check_code(options, words, options["trust_code"])
    threads, taken = options["threads"], inspect.signature(COMMANDS[name]).parameters
    options = {key: value for key, value in options.items() if key in taken}
    work = 0 if COMMANDS[name] in SMALL else math.inf
    with search_current_folder(options, words), threads_for_work(threads, work):
        return COMMANDS[name](**options)


@contextmanager
def _plain_output() -> Iterator[None]:
    """Print warnings and log records as sentences, and characters that the terminal lacks as `?`, until the end."""
    logger, handler = logging.getLogger("structured_ensembles"), _SentenceHandler(logging.WARNING)
    logger.addHandler(handler)
    shown_before = warnings.showwarning
    stream_errors = {stream: stream.errors for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")}
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    for stream in stream_errors:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        logger.removeHandler(handler)
        warnings.showwarning = shown_before
        for stream, errors in stream_errors.items():
            stream.reconfigure(errors=errors)


@contextmanager
def _stopped_by_termination() -> Iterator[None]:
    """Let SIGTERM stop a command as Ctrl-C does: without that, its worker processes would go on when it is killed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the end of the workers
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _SentenceHandler(logging.Handler):
    """Log handler that prints records as `_show_warning` prints warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        _show_warning(record.getMessage())


def _show_warning(message: Any, *_: Any) -> None:
    """Print a warning as a sentence on stderr."""
    print(f"sens: {printable_lines(str(message))}", file=sys.stderr)
