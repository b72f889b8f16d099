"""parse_yaml(): YAML of untrusted files, plain values only and a limited number of them.

`yaml.safe_load` runs no code, but a few lines of aliases of aliases can expand to billions of values, which cost
nothing until something iterates over, prints or compares them.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_CHARACTERS = 2**16  # a configuration has a few hundred, and PyYAML is slow
MAX_BRACKETS = 400  # PyYAML takes quadratic time where they are nested
MAX_VALUES = 100_000  # of a document with its aliases expanded


def parse_yaml(text: str) -> Any:
    """Parse one YAML document; raise a ValueError that says what is wrong with it."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, but at most {MAX_CHARACTERS:,} are read")
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"it has more than {MAX_BRACKETS} brackets")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and _count_values(root, {}) > MAX_VALUES:
            raise ValueError(f"its aliases expand to more than {MAX_VALUES:,} values")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("its lists or mappings are nested too deeply, or contain themselves") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:  # such as a 32nd of March
        raise ValueError(str(error)) from error


def _count_values(node: Any, counts: dict[int, int | None]) -> int:
    """Count the values of a node with its aliases expanded. counts: those of nodes so far, None while in progress."""
    if id(node) in counts:
        count = counts[id(node)]
        if count is None:  # the node contains itself
            raise RecursionError
        return count
    counts[id(node)] = None
    entries = node.value if isinstance(node, yaml.CollectionNode) else ()
    children = [child for entry in entries for child in (entry if isinstance(entry, tuple) else (entry,))]
    counts[id(node)] = count = 1 + sum(_count_values(child, counts) for child in children)
    return count
