"""Text files of a run, JSON, YAML and CSV, with a checksum; a damaged one raises a ValueError that names it.

A JSON file has the checksum of its other entries under "sha256", a YAML file that of the following lines in its first
line. Files without one (of earlier versions, or written by hand) are read unchecked.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.safe_yaml import parse_yaml

CHECKSUM = "sha256"
YAML_CHECKSUM = "# sha256 of the lines below: "


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with its checksum."""
    write_text(path, json.dumps({**content, CHECKSUM: json_checksum(content)}, indent=1) + "\n")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file, without its checksum. remedy: what to do about a damaged file, for the error message."""
    try:
        content = json.loads(read_text(path))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        expected = content.pop(CHECKSUM, None)
        if expected is not None and expected != json_checksum(content):
            raise ValueError("its contents do not match its checksum")
    except (ValueError, OSError, RecursionError) as error:
        raise damaged_file_error(path, error, remedy) from error
    return content


def json_checksum(content: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of JSON entries, whatever their order."""
    return text_checksum(json.dumps(content, sort_keys=True))


def text_checksum(text: str) -> str:
    """Compute the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write a YAML file whose first line is a comment with the checksum of the others."""
    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
    write_text(path, f"{YAML_CHECKSUM}{text_checksum(text)}\n{text}")


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a YAML mapping by name. remedy: what to do about a damaged file, for the error message."""
    try:
        text = read_text(path)
        if text.startswith(YAML_CHECKSUM):
            first, _, below = text.partition("\n")
            if first.removeprefix(YAML_CHECKSUM) != text_checksum(below):
                raise ValueError("its contents do not match its checksum, or were changed by hand")
        content = parse_yaml(text)
        json.dumps(content)  # raises a TypeError for dates, sets and bytes, which we never write
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise damaged_file_error(path, error, remedy) from error
    if not isinstance(content, dict):
        return {}
    if not all(isinstance(name, str) for name in content):
        raise damaged_file_error(path, ValueError("its names must be text"), remedy)
    return content


def read_table(path: Path, columns: Sequence[str], remedy: str) -> list[dict[str, float | None]]:
    """Read the rows of a CSV file of numbers; an empty cell is None."""
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
    except (ValueError, OSError, csv.Error) as error:
        raise damaged_file_error(path, error, remedy) from error


def damaged_file_error(path: Path, error: BaseException, remedy: str) -> ValueError:
    """Return the error to raise for a damaged file: which one, why, and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if reason.startswith(f"{path} "):
        reason = "it " + reason.removeprefix(f"{path} ")
    return ValueError(f"{path} is damaged: {reason}; {remedy}")


def check_figures(value: Any) -> dict[str, float]:
    """Return the figures of a file by name, as floats; raise a ValueError unless they are numbers."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("it has no figures")
    for name, figure in value.items():
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ValueError(f"the figure {name} is not a number")
    try:
        return {name: float(figure) for name, figure in value.items()}
    except OverflowError as error:
        raise ValueError(f"a figure is too large: {error}") from error
