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
from structured_ensembles.cli.train import train

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "continual": continual,
    "models": models,
    "datasets": datasets,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. What a user did wrong becomes a sentence, not a traceback."""
    chosen = _parser().parse_args(arguments)
    name = chosen["subcommand"]
    options = chosen[name].as_dict()
    options.pop("config", None)
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        return COMMANDS[name](**options)
    except KeyboardInterrupt:
        print("sens: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"sens: {error}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="sens", description="Ensembles cut out of one network.")
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        own = ArgumentParser(description=(function.__doc__ or "").splitlines()[0])
        own.add_argument("--config", action="config", help="a YAML file with any of these options")
        lists = {
            key: get_args(hint)[0]
            for key, hint in get_type_hints(function).items()
            if get_origin(hint) is list
            and inspect.signature(function).parameters[key].default is inspect.Parameter.empty
        }
        own.add_function_arguments(function, as_positional=True, fail_untyped=True, skip=set(lists))
        for key, item in lists.items():  # several words, such as the pictures of `sens predict`
            own.add_argument(key, nargs="+", type=item, metavar=key.upper())
        commands.add_subcommand(name, own, help=(function.__doc__ or "").splitlines()[0])
    return parser


def _show_warning(message: Any, *_: Any) -> None:
    print(f"sens: {message}", file=sys.stderr)
