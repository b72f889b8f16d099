"""render_card(): the README.md of a shared ensemble; every number in it was counted, fitted or handed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import yaml

from structured_ensembles.artifact import Contents
from structured_ensembles.common.inputs import is_several
from structured_ensembles.common.markdown import escape_markdown, write_table
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.version import VERSION
from structured_ensembles.networks.provenance import distinct_bases, origin_of

LIBRARY = "structured-ensembles"
CLASSES_SHOWN = 100  # a card of thousands of classes is no longer read; the file has all of them


def render_card(
    contents: Contents, file: str, file_bytes: int, figures: Mapping[str, float], dataset: str | None, repo: str | None
) -> str:
    """Write the model card of an ensemble as Markdown with the header that a hub reads.

    file, file_bytes: name and size of its file. figures: as `evaluate` returns them. dataset: what they were measured
    on. repo: the repository that the card is for, such as "owner/name"; None for a folder.
    """
    title = repo.rpartition("/")[2] if repo else "An ensemble of networks"
    sections = [
        f"---\n{_header(contents)}---\n",
        f"# {escape_markdown(title)}\n",
        _introduction(contents),
        _size_section(contents, file, file_bytes),
        _figures_section(figures, dataset),
        _inputs_section(contents),
        _calibration_section(contents),
        _loading_section(contents, repo),
    ]
    return "\n".join(section for section in sections if section)


def count_members(contents: Contents) -> int:
    """Count the members; one network may stand for several."""
    return sum(getattr(network, "num_members", 1) for network in contents.networks)


def count_parameters(contents: Contents) -> int:
    """Count the parameters of all members."""
    return sum(parameter.numel() for network in contents.networks for parameter in network.parameters())


def _header(contents: Contents) -> str:
    """Write the YAML that a hub shows beside the card."""
    header: dict[str, Any] = {"library_name": LIBRARY, "tags": ["ensemble", "uncertainty", "calibration"]}
    if contents.pixels and contents.task == "classification":
        header["pipeline_tag"] = "image-classification"
    return yaml.safe_dump(header, sort_keys=False)


def _introduction(contents: Contents) -> str:
    """Say in a sentence what the ensemble is."""
    origin, members = origin_of(contents.networks[0]), count_members(contents)
    network = "a network of its author's own" if origin is None else f"`{_as_code(origin.name)}`"
    cut = "members cut out of" if contents.subnets is not None else "members of the form of"
    one = "one member of the form of" if members == 1 and contents.subnets is None else f"{members} {cut}"
    return f"An ensemble for {contents.task}: {one} {network}.\n"


def _size_section(contents: Contents, file: str, file_bytes: int) -> str:
    """Write the counted sizes."""
    parameters = count_parameters(contents)
    rows = {
        "members": f"{count_members(contents):,}",
        "parameters of all members": f"{parameters:,}",
        "size of the file": f"{file_bytes:,} bytes (`{file}`)",
    }
    bases = distinct_bases(contents.networks)
    if contents.subnets is not None and len(bases) == 1:
        names = {name for name, _ in contents.networks[0].named_parameters()}
        full = sum(math.prod(shape) for name, shape in bases[0].items() if name in names)
        rows["parameters of the one network they were cut out of"] = f"{full:,}"
        rows["memory, in networks of that size"] = f"{parameters / full:.3f}" if full else "–"
    return "## Size\n\n" + _table(("", ""), rows)


def _figures_section(figures: Mapping[str, float], dataset: str | None) -> str:
    """Write the figures that were measured, or say that none were handed in."""
    if not figures:
        return "## Figures\n\nNone were recorded with this ensemble.\n"
    where = f" on {escape_markdown(dataset)}" if dataset else ""
    rows = {f"`{_as_code(name)}`": f"{value:.6g}" for name, value in figures.items()}
    text = f"As its author measured them{where}; the names are those of `structured_ensembles.evaluate`."
    return f"## Figures\n\n{text}\n\n" + _table(("figure", "value"), rows)


def _inputs_section(contents: Contents) -> str:
    """Say what goes in and what comes out."""
    shape = contents.input_shape
    kind = "pixels, uint8 or floats in [0,1]" if contents.pixels else "ids" if contents.ids else "floats"
    if shape is None:
        text = "The shape of its inputs is not recorded."
    elif is_several(shape):
        text = f"Several inputs, shapes without the batch: `{_as_code(str(shape))}`."
    else:
        text = f"Inputs: {kind}, of the shape `(batch, {', '.join(map(str, shape))})`."
    if contents.normalization is not None:
        text += " Normalisation is part of the ensemble."
    if contents.task == "classification" and contents.classes:
        names = [escape_markdown(name) for name in contents.classes[:CLASSES_SHOWN]]
        more = len(contents.classes) - len(names)
        text += f"\n\n{counted(len(contents.classes), 'class')}: {', '.join(names)}"
        text += f" and {more} more." if more else "."
    return f"## Inputs and outputs\n\n{text}\n"


def _calibration_section(contents: Contents) -> str:
    """List what was fitted on held-out samples."""
    calibration = contents.calibration
    rows = {f"temperature, rule `{rule}`": f"{value:.6g}" for rule, value in calibration.temperatures.items()}
    if calibration.threshold is not None:
        rows["entropy above which a prediction is discarded"] = f"{calibration.threshold:.6g}"
    if calibration.conformal is not None:
        rows["coverage that the prediction sets or intervals were fitted for"] = f"{calibration.conformal.coverage:.6g}"
    return "## Calibration\n\n" + _table(("", ""), rows) if rows else ""


def _loading_section(contents: Contents, repo: str | None) -> str:
    """Show how the ensemble is loaded and used."""
    origin = origin_of(contents.networks[0])
    options = ", model=your_network" if origin is None else ", trust_code=True" if ":" in origin.name else ""
    lines = [
        "import structured_ensembles as se",
        "",
        f'ensemble = se.Ensemble.from_pretrained("{repo or "path/to/this/folder"}"{options})',
    ]
    if contents.task == "classification":
        lines += ["ensemble.predict_proba(x)  # (samples, classes)", "ensemble.uncertainty(x)    # one row per sample"]
    else:
        lines += ["ensemble.predict(x)  # the mean of the members", "ensemble.spread(x)   # their standard deviation"]
    notes = f"Written by {LIBRARY} {VERSION} with torch {torch.__version__}; no pickle."
    if options == ", trust_code=True":
        notes += " `trust_code=True` imports the function that is named above and calls it: look at it first."
    if origin is None:
        notes += " The file does not say how its network is made: give one of that architecture as `model=`."
    install = 'pip install "structured-ensembles[hub]"' if repo else "pip install structured-ensembles"
    code = "\n".join(lines)
    return f"## Load it\n\n```sh\n{install}\n```\n\n```python\n{code}\n```\n\n{notes}\n"


def _as_code(text: str) -> str:
    """Return text that can stand between backticks in a cell: one line, without backticks and bars."""
    return " ".join(text.split()).replace("`", "'").replace("|", "/")


def _table(header: tuple[str, str], rows: Mapping[str, str]) -> str:
    """Write a table of two columns."""
    return write_table(header, rows.items(), right=[1]) + "\n"
