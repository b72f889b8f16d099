"""`sens COMMAND`: each command is a function in a file of its own; its arguments are the command's options."""

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

from structured_ensembles.cli.command_line import check_code, current_folder_for, settled_words
from structured_ensembles.cli.continual import continual
from structured_ensembles.cli.demo import demo
from structured_ensembles.cli.evaluate import evaluate
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
    "continual": continual,
    "models": models,
    "datasets": datasets,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. A failure becomes a sentence, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _plain_output():
        return run_guarded(lambda: _run(words), words)


def _run(words: Sequence[str]) -> int:
    """Parse a command line and run its command."""
    settled = settled_words(words, COMMANDS)
    chosen = _parser().parse_args(settled)
    name = chosen["subcommand"]
    options = chosen[name].as_dict()
    options.pop("config", None)
    check_code(options, words, options["trust_code"])
    if "trust_code" not in inspect.signature(COMMANDS[name]).parameters:
        del options["trust_code"]
    for key, hint in get_type_hints(COMMANDS[name]).items():
        if isinstance(hint, type) and is_dataclass(hint):  # the parser gives its fields
            options[key] = hint(**options[key])
    with current_folder_for(options, words):
        return COMMANDS[name](**options)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="sens", description="Ensembles cut out of one network.", allow_abbrev=False)
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        own = ArgumentParser(description=(function.__doc__ or "").splitlines()[0], allow_abbrev=False)
        own.add_argument("--config", action="config", help="a YAML file with any of these options, which beat it")
        hints = get_type_hints(function)
        lists = {key: item for key, hint in hints.items() if (item := _item_type(hint))}
        own.add_function_arguments(function, as_positional=True, fail_untyped=True, skip=set(lists))
        for key, item in lists.items():  # several words, such as the pictures of `sens predict`
            if inspect.signature(function).parameters[key].default is inspect.Parameter.empty:
                own.add_argument(key, nargs="+", type=item, metavar=key.upper())
            else:
                own.add_argument(f"--{key}", nargs="*", type=item, metavar=key.upper(), help=_help(function, key))
        if "trust_code" not in hints:
            text = "let the file of --config name functions to import"
            own.add_argument("--trust_code", type=bool, default=False, help=text)
        commands.add_subcommand(name, own, help=(function.__doc__ or "").splitlines()[0])
    return parser


def _item_type(hint: Any) -> type | None:
    """Of a list, or of a list that may be left out."""
    lists = [option for option in (hint, *get_args(hint)) if get_origin(option) is list]
    return get_args(lists[0])[0] if lists else None


def _help(function: Callable[..., int], key: str) -> str:
    """What the docstring says of an argument."""
    lines = (line.strip() for line in (function.__doc__ or "").splitlines())
    return next((line.partition(": ")[2] for line in lines if line.startswith(f"{key}: ")), "")


@contextmanager
def _plain_output() -> Iterator[None]:
    """Show warnings and the log as sentences, and characters that the terminal lacks as `?`; afterwards as before."""
    log, sentences = logging.getLogger("structured_ensembles"), _Sentences(logging.WARNING)
    log.addHandler(sentences)
    showing = warnings.showwarning
    handling = {stream: stream.errors for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")}
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    for stream in handling:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        log.removeHandler(sentences)
        warnings.showwarning = showing
        for stream, errors in handling.items():
            stream.reconfigure(errors=errors)


class _Sentences(logging.Handler):
    """Print log records as `_show_warning` does warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        _show_warning(record.getMessage())


def _show_warning(message: Any, *_: Any) -> None:
    print(f"sens: {printable_lines(str(message))}", file=sys.stderr)
