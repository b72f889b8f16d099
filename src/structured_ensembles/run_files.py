"""Records: the small text files of a run, with a checksum; a ValueError names the file and what is wrong with it.

A JSON record keeps the checksum of its other entries under "sha256", a YAML file that of the lines below in its first
line. Records without one (of earlier versions, or written by hand) are read as they are.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from structured_ensembles.files import write_text

LARGEST = 64 * 2**20  # bytes; the largest that we write, the neurons kept of a wide network, have a few
LARGEST_YAML = 64 * 2**10  # PyYAML is slow
MOST_BRACKETS = 400  # and slower still, by the square, if they are nested; what we write has few
CHECKSUM = "sha256"
YAML_CHECKSUM = "# sha256 of the lines below: "
# PyYAML lets exceptions of its own code through, such as the KeyError of "!!bool x".
YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON record with its checksum."""
    write_text(path, json.dumps({**content, CHECKSUM: json_checksum(content)}, indent=1) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON record, without its checksum. remedy: what to do about a damaged one, for the message."""
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise ValueError("it holds no record")
        expected = content.pop(CHECKSUM, None)
        if expected is not None and expected != json_checksum(content):
            raise ValueError("its contents do not match its checksum")
    except (ValueError, RecursionError) as error:
        raise damaged(path, error, remedy) from error
    return content


def json_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write a YAML file whose first line, a comment, has the checksum of the others."""
    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    write_text(path, f"{YAML_CHECKSUM}{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a YAML file with one value for each name. remedy: what to do about a damaged one, for the message."""
    try:
        text = read_text(path, LARGEST_YAML)
        if text.startswith(YAML_CHECKSUM):
            first, _, below = text.partition("\n")
            if first.removeprefix(YAML_CHECKSUM) != hashlib.sha256(below.encode()).hexdigest():
                raise ValueError("its contents do not match its checksum, or were changed by hand")
        if text.count("[") + text.count("{") > MOST_BRACKETS:
            raise ValueError(f"it has more than {MOST_BRACKETS} brackets")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has aliases, which could stand for any amount of memory")
        content = yaml.safe_load(text)
        json.dumps(content)  # or a TypeError: what we write has no dates, sets or bytes
    except YAML_ERRORS as error:
        raise damaged(path, error, remedy) from error
    if not isinstance(content, dict):
        return {}
    if not all(isinstance(name, str) for name in content):
        raise damaged(path, ValueError("its names must be text"), remedy)
    return content


def read_table(path: Path, columns: Sequence[str], remedy: str) -> list[dict[str, float | None]]:
    """Read the rows of a CSV file of numbers; a cell may be empty."""
    try:
        lines = read_text(path).splitlines()
        rows = list(csv.reader(lines))
        if not rows or rows[0] != list(columns):
            raise ValueError(f"its columns are not {', '.join(columns)}")
        if any(len(row) != len(columns) for row in rows):
            raise ValueError("its rows are not equally long")
        return [
            {name: float(cell) if cell else None for name, cell in zip(columns, row, strict=True)} for row in rows[1:]
        ]
    except (ValueError, csv.Error) as error:
        raise damaged(path, error, remedy) from error


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Read a regular file of UTF-8 text with at most `largest` bytes."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:  # a FIFO would wait
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size > largest:
                raise ValueError(f"it has {status.st_size:,} bytes, and may have {largest:,}")
            return file.read(largest).decode("utf-8")
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error


def damaged(path: Path, error: BaseException, remedy: str) -> ValueError:
    """The error to raise for a damaged file: which one, why, and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{path} is damaged: {reason}; {remedy}")


def checked_figures(value: Any) -> dict[str, float]:
    """Figures by name, as a record has them; a ValueError if they are something else."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("it has no figures")
    for name, figure in value.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ValueError(f"the figure {name} is not a number")
    try:
        return {name: float(figure) for name, figure in value.items()}
    except OverflowError as error:
        raise ValueError(f"a figure is too large: {error}") from error
