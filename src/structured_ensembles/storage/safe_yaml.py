"""parse_yaml(): YAML from untrusted files, with plain values only and a bound on their number.

`yaml.safe_load` runs no code, but a few lines of aliases of aliases stand for billions of values, which cost nothing
until somebody walks, prints or compares them.
"""

from __future__ import annotations

from typing import Any

import yaml

LARGEST = 2**16  # characters; a configuration has a few hundred, and PyYAML is slow
MOST_BRACKETS = 400  # it is slower still, by the square, where they are nested
MOST_VALUES = 100_000  # in a document, those that aliases stand for counted each time


def parse_yaml(text: str) -> Any:
    """Parse one YAML document; raise a ValueError that says what is wrong with it."""
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters, but at most {LARGEST:,} are read")
    if text.count("[") + text.count("{") > MOST_BRACKETS:
        raise ValueError(f"it has more than {MOST_BRACKETS} brackets")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and _size(root, {}) > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("its lists or mappings are nested too deeply, or hold themselves") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:  # such as a 32nd of March
        raise ValueError(str(error)) from error


def _size(node: Any, known: dict[int, int | None]) -> int:
    """Count the values that a node stands for."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:  # on the way here
            raise RecursionError
        return size
    known[id(node)] = None
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    children = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
    known[id(node)] = size = 1 + sum(_size(child, known) for child in children)
    return size
