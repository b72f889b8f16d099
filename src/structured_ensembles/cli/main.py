"""`sens COMMAND`: each command is a function in a file of its own; its arguments are the command's options."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from structured_ensembles.cli.continual import continual
from structured_ensembles.cli.demo import demo
from structured_ensembles.cli.evaluate import evaluate
from structured_ensembles.cli.lists import datasets, models
from structured_ensembles.cli.predict import predict
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
    """Run a command; returns its exit code. What a user did wrong becomes a sentence, not a traceback."""
    try:
        chosen = _parser().parse_args(_with_values(sys.argv[1:] if arguments is None else arguments))
    except UnicodeDecodeError as error:
        print(f"sens: --config must be a YAML file, which is text: {error}", file=sys.stderr)
        return 2
    name = chosen["subcommand"]
    options = chosen[name].as_dict()
    options.pop("config", None)
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        return COMMANDS[name](**options)
    except KeyboardInterrupt:
        goes_on = "" if name == "demo" else "; the same command goes on from here"
        print(f"sens: stopped{goes_on}", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"sens: {error}", file=sys.stderr)
        return 2


def _with_values(arguments: Sequence[str]) -> list[str]:
    """`--smoke` alone means `--smoke true`, for the options that are true or false."""
    command = COMMANDS.get(arguments[0]) if arguments else None
    hints = {} if command is None else get_type_hints(command)
    found: list[str] = []
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        found.append(word)
        if hints.get(word.removeprefix("--")) is bool and word.startswith("--"):
            found += [] if following.lower() in ("true", "false", "yes", "no") else ["true"]
    return found


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="sens", description="Ensembles cut out of one network.")
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        own = ArgumentParser(description=(function.__doc__ or "").splitlines()[0])
        own.add_argument("--config", action="config", help="a YAML file with any of these options")
        lists = {key: item for key, hint in get_type_hints(function).items() if (item := _item_type(hint))}
        own.add_function_arguments(function, as_positional=True, fail_untyped=True, skip=set(lists))
        for key, item in lists.items():  # several words, such as the pictures of `sens predict`
            if inspect.signature(function).parameters[key].default is inspect.Parameter.empty:
                own.add_argument(key, nargs="+", type=item, metavar=key.upper())
            else:
                own.add_argument(f"--{key}", nargs="*", type=item, metavar=key.upper(), help=_help(function, key))
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


def _show_warning(message: Any, *_: Any) -> None:
    print(f"sens: {message}", file=sys.stderr)
