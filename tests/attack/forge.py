"""Forged files: well-formed, with a right checksum where there is one, and something in them that should not be."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from structured_ensembles.storage.container import read_container, write_container

Forgery = Callable[[Random, Path], None]  # changes the file at the path
Tensors = dict[str, Tensor]
CANARY = "attack_canary:run"  # a function that nobody may call, see `kinds.py`
DEPTH = 3000  # of nested lists, beyond what Python's recursion allows


def _nested() -> Any:
    value: Any = 0
    for _ in range(DEPTH):
        value = [value]
    return value


SMALL = [None, True, False, 0, -1, 3, 0.5, "", "x", "7", "mean", [], [[]], {}, {"a": 1}, [1, 2, 3], "\0", "../../x"]
LARGE = [700_000_000, 10_000_000, 2**31, 2**63, 2**64, 10**30, -(2**63), 1e308, math.nan, math.inf, -math.inf]
LARGE += ["x" * 100_000, [0] * 10_000, [10**6, 10**6], _nested()]


# JSON trees ----------------------------------------------------------------------------------------------------------


def change_tree(random: Random, tree: Any, operation: str) -> Any:
    """Return a copy of a JSON value with one node deleted, renamed, retyped, enlarged or made a name of code."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return random.choice(SMALL)
    container, key = random.choice(places)
    if operation == "delete":
        del container[key]
    elif operation == "rename":
        value = container.pop(key)
        container.update({f"{key}_": value}) if isinstance(container, dict) else container.append(value)
    elif operation == "retype":
        container[key] = random.choice(SMALL)
    elif operation == "enlarge":
        container[key] = random.choice(LARGE)
    elif operation == "code":
        names = [own for own in places if own[1] in ("name", "model", "dataset", "method", "loss")]
        container, key = random.choice(names or places)
        container[key] = CANARY
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value, depth first."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


@contextmanager
def _deep() -> Iterator[None]:
    """Let JSON and YAML be written that cannot be read."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * DEPTH)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# Safetensors files ---------------------------------------------------------------------------------------------------


def reseal(path: Path, change: Callable[[Any, Tensors], tuple[Any, Tensors]]) -> None:
    """Rewrite a file with another structure or other tensors, and the checksum that the library gives to them."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for form, text in metadata.items():
        if '"sha256"' in text and '"structure"' in text:
            version = json.loads(text)["version"]
            structure, tensors = read_container(path, form, version, "anything")
            structure, tensors = change(structure, {name: tensor.clone() for name, tensor in tensors.items()})
            with _deep():
                write_container(path, form, version, structure, tensors)
            return
    metadata.pop("sha256", None)  # of data sets; files that others made have none
    plain, tensors = change({name: _parsed(text) for name, text in metadata.items()}, tensors)
    with _deep():
        metadata = {name: own if isinstance(own, str) else json.dumps(own) for name, own in plain.items()}
    save_file(tensors, path, metadata)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _of_structure(operation: str) -> Forgery:
    def forge(random: Random, path: Path) -> None:
        def change(structure: Any, tensors: Tensors) -> tuple[Any, Tensors]:
            changed = change_tree(random, structure, operation)
            return (changed if isinstance(changed, dict) else structure), tensors

        reseal(path, change)

    return forge


def _of_tensors(change: Callable[[Random, Tensors, str], None]) -> Forgery:
    def forge(random: Random, path: Path) -> None:
        def changed(structure: Any, tensors: Tensors) -> tuple[Any, Tensors]:
            change(random, tensors, random.choice(sorted(tensors)))
            return structure, tensors

        reseal(path, changed)

    return forge


def _delete(random: Random, tensors: Tensors, name: str) -> None:
    del tensors[name]


def _rename(random: Random, tensors: Tensors, name: str) -> None:
    tensors[random.choice([name + "_", name[::-1], "7." + name, name.replace(".", "", 1), "" if name else "x"])] = (
        tensors.pop(name)
    )


def _add(random: Random, tensors: Tensors, name: str) -> None:
    tensors[random.choice([name + "x", "9." + name, "x"])] = tensors[name].clone()


def _reshape(random: Random, tensors: Tensors, name: str) -> None:
    tensor = tensors[name]
    shapes = [tensor[None], tensor.flatten()[:0], torch.cat([tensor.flatten(), tensor.flatten()])]
    shapes += [tensor[:-1].clone()] if tensor.dim() else []
    tensors[name] = random.choice(shapes).contiguous().clone()


def _cast(random: Random, tensors: Tensors, name: str) -> None:
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    tensors[name] = tensors[name].to(random.choice(kinds))


def _fill(random: Random, tensors: Tensors, name: str) -> None:
    tensor = tensors[name]
    values = [math.nan, math.inf, -6e4, 0] if tensor.is_floating_point() else [0, 1, 100]
    tensors[name] = torch.full_like(tensor, random.choice(values))


# Text files ----------------------------------------------------------------------------------------------------------


def _json(operation: str) -> Forgery:
    def forge(random: Random, path: Path) -> None:
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            content.pop("sha256", None)  # records without a checksum are read, since people write some by hand
        with _deep():
            text = json.dumps(change_tree(random, content, operation))
        path.write_text(text)

    return forge


def _yaml(operation: str) -> Forgery:
    def forge(random: Random, path: Path) -> None:
        changed = change_tree(random, yaml.safe_load(path.read_text()), operation)
        with _deep():
            path.write_text(json.dumps(changed))  # which is YAML, without the comment that has the checksum

    return forge


def _cell(random: Random, path: Path) -> None:
    """A table of CSV with a cell replaced, a column or a row lost."""
    rows = list(csv.reader(path.read_text().splitlines()))
    row, column = random.randrange(len(rows)), random.randrange(len(rows[0]))
    operation = random.randrange(4)
    if operation == 0:
        rows[row][column] = str(random.choice([*SMALL, *LARGE[:-1]]))
    elif operation == 1:
        rows = [own[:column] + own[column + 1 :] for own in rows]
    elif operation == 2:
        del rows[row]
    else:
        rows[row] = rows[row] + ["x"] * 5
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path.write_text(text.getvalue())


TEXTS = [
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a: &a\n  b: *a\n",
    "[" * DEPTH + "]" * DEPTH,
    "{" * DEPTH,
    '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "- " * DEPTH + "x",
    "!!python/object/apply:os.system ['touch canary-ran']",
    f"!!python/name:{CANARY.replace(':', '.')}",
    "!!binary |\n  AAAA",
    "--- a\n--- b\n",
    "%YAML 9.9\n---\na",
    "null",
    "[]",
    "{}",
    "7",
    "'text'",
    "\ufeff{}",
    "? [a, b]\n: c\n",
    "seed: 1" + "0" * 5000,
    "seed: 1:" * 20,
    "seed: 2001-01-01T00:00:00Z",
    "dataset: digits\nmodel: mlp\nmethod: structured\nseed: 0\n",
    "dataset: digits\ndataset: mnist\n",
    "a: b: c",
    "\t- x",
    "\0",
    "é\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    "x" * 5_000_000,
    '{"figures": {"cls/accuracy": "' + "9" * 5000 + '"}}',
    '{"figures": ' + "9" * 5000 + "}",
    '{"figures": {"cls/accuracy": NaN, "size/members": 1e999, "size/overhead": -Infinity}}',
]


def _other_text(random: Random, path: Path) -> None:
    path.write_text(random.choice(TEXTS), encoding="utf-8")


OPERATIONS = ("delete", "rename", "retype", "enlarge", "code")
FORGERIES: dict[str, dict[str, Forgery]] = {
    "container": {
        **{operation: _of_structure(operation) for operation in OPERATIONS},
        "tensor-delete": _of_tensors(_delete),
        "tensor-rename": _of_tensors(_rename),
        "tensor-add": _of_tensors(_add),
        "tensor-reshape": _of_tensors(_reshape),
        "tensor-cast": _of_tensors(_cast),
        "tensor-fill": _of_tensors(_fill),
    },
    "json": {**{operation: _json(operation) for operation in OPERATIONS}, "text": _other_text},
    "yaml": {**{operation: _yaml(operation) for operation in OPERATIONS}, "text": _other_text},
    # What users ask for themselves may cost as much as they ask for.
    "options": {**{name: _yaml(name) for name in OPERATIONS if name != "enlarge"}, "text": _other_text},
    "csv": {"cell": _cell, "text": _other_text},
    "bytes": {},
}
# A checksum is not a signature: a forger may say something else. But whoever takes tensors away must be noticed.
MAY_DIFFER = {*OPERATIONS, "tensor-cast", "tensor-fill", "cell", "text"}
