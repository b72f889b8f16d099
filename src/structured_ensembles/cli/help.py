"""The text of `sens --help` and `sens COMMAND --help`: usage, options, examples."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from structured_ensembles.cli.command_line import usage
from structured_ensembles.cli.options import CONFIG, THREADS, TRUST_CODE, Option, read_options, read_summary

WIDEST = 100  # columns
INDENT = 26  # columns before the text on an option
EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("sens demo", "sens demo --out runs/first-try --epochs 10"),
    "train": (
        "sens train --dataset digits --model resnet20 --members 5 --prune 0.5 --out runs/a",
        "sens train --dataset cifar10 --limit 5000 --epochs 10",
        "sens train --dataset 'folder:pets?size=64&test=0.2' --model resnet18 --memory 1.0",
        "sens train --dataset mine.data:load --model mine.networks:make --model-arguments '{width: 2}'",
        "sens train --method deep --changes.rate 0.05 --execution.precision float32",
    ),
    "evaluate": ("sens evaluate runs/a", "sens evaluate runs/a --corruptions fog snow --fgsm 0.02 --ood mnist"),
    "predict": (
        "sens predict runs/a picture.png",
        "sens predict runs/a pictures/ more.jpg --format csv > predictions.csv",
    ),
    "reproduce": (
        "sens reproduce table-accuracy --smoke",
        "sens reproduce table-continual --dataset mnist --seeds 0 1 2",
        "sens reproduce queue --minutes 25 --workers 2",
    ),
    "report": ("sens report runs/a runs/b --out runs/report", "sens report results --docs"),
    "export": ("sens export runs/a --onnx ensemble.onnx --int8 ensemble-int8.onnx",),
    "continual": (
        "sens continual --dataset digits --tasks 5 --out runs/c",
        "sens continual --dataset cifar10 --model half-vgg11 --method supsup",
    ),
    "models": ("sens models", "sens models --check mine.networks:make --shape 3 224 224"),
    "datasets": ("sens datasets", "sens datasets --root /data"),
}


def format_program_help(commands: Mapping[str, Callable[..., Any]]) -> str:
    """Write the help of `sens`: its commands, and where to go on."""
    lines = [_wrap(f"  {name}", read_summary(function), 13) for name, function in commands.items()]
    starts = ("sens demo", "sens train --dataset digits --out runs/a", "sens predict runs/a picture.png")
    return "\n".join(
        [
            "usage: sens COMMAND [options]",
            "",
            "Ensembles cut out of one network.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            _wrap("  --help", "show this text; after a command, all of its options", 13),
            _wrap("  --version", "show the versions of this library, torch and Python", 13),
            "",
            "to begin with:",
            *(f"  {line}" for line in starts),
        ]
    )


def format_command_help(command: str, function: Callable[..., Any]) -> str:
    """Write the help of a command: usage, arguments, options, examples."""
    options = read_options(function)
    positional = [option for option in options.values() if option.is_positional]
    shared = [option for option in (TRUST_CODE, THREADS) if options[option.name] is option]
    listed = [option for option in options.values() if not option.is_positional and option not in shared]
    flat = [field for option in listed for field in (option.fields.values() or (option,))]
    lines = [f"usage: {usage(command, options)}", "", *_fill(read_summary(function)), ""]
    if positional:
        labels = {option.label + " …" * bool(option.list_type): option.text for option in positional}
        lines += ["arguments:", *(_wrap(f"  {label}", text) for label, text in labels.items()), ""]
    if flat:
        lines += ["options:", *map(_format_option, flat), ""]
    lines += ["options of every command:", *map(_format_option, (CONFIG, *shared)), _wrap("  --help", "show this"), ""]
    return "\n".join([*lines, "examples:", *(f"  {line}" for line in EXAMPLES.get(command, ()))])


def _format_option(option: Option) -> str:
    """Write the lines on an option: name, values, text, default."""
    shown_default = option.default is not None and option.default is not False and not option.fields
    default = f" (default: {option.default})" if shown_default else ""
    metavar = "FILE" if option is CONFIG else "true|false" if option.default is True else option.metavar
    return _wrap(f"  {option.label} {metavar}".rstrip(), option.text + default)


def _wrap(start: str, text: str, indent: int = INDENT) -> str:
    """Write a start and, from a column on, a text of several lines; a long start has a line of its own."""
    lines: Sequence[str] = textwrap.wrap(text, _width() - indent, break_on_hyphens=False) or [""]
    if len(start) + 2 > indent:
        lines = ["", *lines]
    first, *rest = lines
    return "\n".join([f"{start:<{indent}}{first}".rstrip(), *(" " * indent + line for line in rest)])


def _fill(text: str) -> list[str]:
    return textwrap.wrap(text, _width())


def _width() -> int:
    """Return how many columns the help may take."""
    return max(60, min(WIDEST, shutil.get_terminal_size().columns))
