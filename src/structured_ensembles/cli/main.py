"""`sens COMMAND`: each command is a function in its own file, whose arguments are the command's options."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from structured_ensembles.cli.command_line import check_code, normalize_words, search_current_folder
from structured_ensembles.cli.continual import continual
from structured_ensembles.cli.demo import demo
from structured_ensembles.cli.evaluate import evaluate
from structured_ensembles.cli.export import export
from structured_ensembles.cli.failures import run_guarded
from structured_ensembles.cli.lists import datasets, models
from structured_ensembles.cli.predict import predict
from structured_ensembles.cli.printing import printable_lines
from structured_ensembles.cli.report import report
from structured_ensembles.cli.reproduce import reproduce
from structured_ensembles.cli.train import train

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; a failure prints a sentence, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _plain_output():
        return run_guarded(lambda: _run(words), words)


def _run(words: Sequence[str]) -> int:
    """Parse a command line and run its command."""
    normalized = normalize_words(words, COMMANDS)
    parsed = _build_parser().parse_args(normalized)
    name = parsed["subcommand"]
    options = parsed[name].as_dict()
    options.pop("config", None)
    check_code(options, words, options["trust_code"])
    if "trust_code" not in inspect.signature(COMMANDS[name]).parameters:
        del options["trust_code"]
    for key, hint in get_type_hints(COMMANDS[name]).items():
        if isinstance(hint, type) and is_dataclass(hint):  # the parser returns its fields
            options[key] = hint(**options[key])
    with search_current_folder(options, words):
        return COMMANDS[name](**options)


def _build_parser() -> ArgumentParser:
    """Build the parser with one subcommand per command."""
    parser = ArgumentParser(prog="sens", description="Ensembles cut out of one network.", allow_abbrev=False)
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        command_parser = ArgumentParser(description=(function.__doc__ or "").splitlines()[0], allow_abbrev=False)
        command_parser.add_argument(
            "--config",
            action="config",
            help="a YAML file with any of these options; options on the command line override it",
        )
        hints = get_type_hints(function)
        lists = {key: item for key, hint in hints.items() if (item := _item_type(hint))}
        command_parser.add_function_arguments(function, as_positional=True, fail_untyped=True, skip=set(lists))
        for key, item in lists.items():  # several words, such as the images of `sens predict`
            if inspect.signature(function).parameters[key].default is inspect.Parameter.empty:
                command_parser.add_argument(key, nargs="+", type=item, metavar=key.upper())
            else:
                command_parser.add_argument(
                    f"--{key}", nargs="*", type=item, metavar=key.upper(), help=_argument_help(function, key)
                )
        if "trust_code" not in hints:
            text = "let the file of --config name functions to import"
            command_parser.add_argument("--trust_code", type=bool, default=False, help=text)
        commands.add_subcommand(name, command_parser, help=(function.__doc__ or "").splitlines()[0])
    return parser


def _item_type(hint: Any) -> type | None:
    """Return the item type of a list, or of an optional list; None for other types."""
    lists = [option for option in (hint, *get_args(hint)) if get_origin(option) is list]
    return get_args(lists[0])[0] if lists else None


def _argument_help(function: Callable[..., int], key: str) -> str:
    """Return the docstring's line on an argument."""
    lines = (line.strip() for line in (function.__doc__ or "").splitlines())
    return next((line.partition(": ")[2] for line in lines if line.startswith(f"{key}: ")), "")


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


class _SentenceHandler(logging.Handler):
    """Log handler that prints records as `_show_warning` prints warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        _show_warning(record.getMessage())


def _show_warning(message: Any, *_: Any) -> None:
    """Print a warning as a sentence on stderr."""
    print(f"sens: {printable_lines(str(message))}", file=sys.stderr)
