"""SampleDetails: what a page shows of single test samples; measured once and kept in the run folder."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalSets, fit_sets, samples_needed
from structured_ensembles.common.checks import check_number, check_type, check_whole
from structured_ensembles.common.devices import pick_device
from structured_ensembles.data import Data
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.prediction.combination import combine_logits, exact_probabilities, uncertainty_of
from structured_ensembles.report.reliability import Bin, bin_confidence
from structured_ensembles.runs.folder import read_config
from structured_ensembles.runs.ingredients import load_run_data, load_run_ensemble
from structured_ensembles.storage.run_files import read_json, write_json
from structured_ensembles.zoo.by_name import Trust

FILE = "details.json"
SHOWN = 12  # samples of each kind in the gallery
LARGEST = 96  # pixels of a picture's longer side
MAX_NAMES = 8  # classes of a set that are listed
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
PICTURE = re.compile(r"(data:image/png;base64,[A-Za-z0-9+/=]*)?")


@dataclass(frozen=True)
class Vote:
    """Class that one member names, and its probability."""

    name: str
    probability: float
    right: bool


@dataclass(frozen=True)
class ShownSample:
    """Test sample of the gallery.

    picture: a PNG as a data URL; "" if the inputs are no images. names: the classes of its conformal set; None without.
    """

    number: int
    picture: str
    truth: str
    guess: str
    right: bool
    probability: float
    entropy: float
    kept: bool
    votes: tuple[Vote, ...]
    names: tuple[str, ...] | None


@dataclass(frozen=True)
class Coverage:
    """Conformal sets of one promise, fitted to the validation split: their coverage and mean size on the test split."""

    promised: float
    observed: float
    size: float


@dataclass(frozen=True)
class SampleDetails:
    """Reliability before and after temperature, coverage against set size, and the most uncertain samples.

    after: None without a temperature. threshold: the entropy above which predictions are discarded.
    samples: the most uncertain of those discarded, then of those kept.
    """

    temperature: float
    threshold: float | None
    before: tuple[Bin, ...]
    after: tuple[Bin, ...] | None
    coverages: tuple[Coverage, ...]
    samples: tuple[ShownSample, ...]


def measure_details(ensemble: Ensemble, data: Data, predictions: tuple[Tensor, Tensor] | None = None) -> SampleDetails:
    """Measure the details of a classifier on the test split, and on the validation split where there is one.

    predictions: its logits (members, samples, classes) and the targets (samples,) of the test split, where known.
    """
    logits, targets = predictions or gather_predictions(ensemble, data.split("test"))
    temperature = ensemble.temperature
    before, after = combine_logits(logits), exact_probabilities(logits, temperature)
    if not bool(after.isfinite().all()):  # a network that diverged
        return SampleDetails(temperature, ensemble.threshold, (), None, (), ())
    coverages: tuple[Coverage, ...] = ()
    if data.validation is not None:
        held_out, labels = gather_predictions(ensemble, data.validation)
        coverages = _measure_coverages(exact_probabilities(held_out, temperature), labels, after, targets)
    return SampleDetails(
        temperature,
        ensemble.threshold,
        _bins(before, targets),
        None if temperature == 1 else _bins(after, targets),
        coverages,
        _choose_samples(ensemble, data, logits, after, targets),
    )


def measure_run_details(
    folder: Path, *, root: Path | None = None, device: str = "auto", trust_code: Trust = False
) -> SampleDetails:
    """Measure the details of a run of `sens train`, a classification, or read them if they were measured."""
    known = read_details(folder)
    if known is not None:
        return known
    config = read_config(folder)
    data = load_run_data(folder, config, root, trust_code)
    ensemble = load_run_ensemble(folder, config, data, trust_code)
    details = measure_details(ensemble.to(pick_device(device, ensemble)), data)
    write_json(folder / FILE, asdict(details))
    return details


def read_details(folder: Path) -> SampleDetails | None:
    """Read the details of a run; None if they were not measured. A damaged file is left out with a warning."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return _parse(read_json(path, "delete it, so that it is measured again"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        warnings.warn(f"{path} is left out: {str(error) or type(error).__name__}", stacklevel=2)
        return None


def _bins(probabilities: Tensor, targets: Tensor) -> tuple[Bin, ...]:
    confidence, labels = probabilities.max(-1)
    return tuple(bin_confidence(confidence, labels == targets))


def _measure_coverages(held_out: Tensor, labels: Tensor, test: Tensor, targets: Tensor) -> tuple[Coverage, ...]:
    """Measure sets for every promise that so many held-out samples allow; probabilities (samples, classes)."""
    measured = []
    for promised in COVERAGES:
        if len(labels) >= samples_needed(promised):
            sets = fit_sets(held_out, labels, promised).sets(test)
            covered = sets.gather(-1, targets[:, None]).double().mean()
            measured.append(Coverage(promised, float(covered), float(sets.sum(-1).double().mean())))
    return tuple(measured)


def _choose_samples(
    ensemble: Ensemble, data: Data, logits: Tensor, probabilities: Tensor, targets: Tensor
) -> tuple[ShownSample, ...]:
    """Choose the most uncertain samples of those discarded and of those kept; logits (members, samples, classes)."""
    entropy = uncertainty_of(logits, ensemble.temperature).entropy.double()
    limit = math.inf if ensemble.threshold is None else ensemble.threshold
    order = entropy.argsort(descending=True, stable=True)
    kept = entropy[order] <= limit
    rows = torch.cat([order[~kept][:SHOWN], order[kept][:SHOWN]])
    rule = ensemble.calibration.conformal
    sets = rule.sets(probabilities[rows]) if isinstance(rule, ConformalSets) else None
    pictures = _pictures(data, rows)
    member_probabilities, votes = logits[:, rows].softmax(-1).max(-1)
    unnamed = range(len(data.classes), logits.shape[-1])  # a network may have more outputs than there are classes
    classes = (*data.classes, *map(str, unnamed))
    shown = []
    for position, row in enumerate(rows.tolist()):
        truth, guess = int(targets[row]), int(probabilities[row].argmax())
        names = None if sets is None else [classes[label] for label in sets[position].nonzero().flatten().tolist()]
        shown.append(
            ShownSample(
                row,
                pictures[position],
                classes[truth],
                classes[guess],
                truth == guess,
                float(probabilities[row, guess]),
                float(entropy[row]),
                bool(entropy[row] <= limit),
                tuple(
                    Vote(classes[int(vote)], float(probability), int(vote) == truth)
                    for vote, probability in zip(votes[:, position], member_probabilities[:, position], strict=True)
                ),
                None if names is None else _shorten(names),
            )
        )
    return tuple(shown)


def _shorten(names: Sequence[str]) -> tuple[str, ...]:
    more = (f"{len(names) - MAX_NAMES} more",) if len(names) > MAX_NAMES else ()
    return (*names[:MAX_NAMES], *more)


def _pictures(data: Data, rows: Tensor) -> list[str]:
    """Encode test samples as PNG in data URLs; empty texts where the inputs are no images, or come from a loader."""
    split = data.split("test")
    if not isinstance(split, IndexedSplit) or not len(rows):
        return [""] * len(rows)
    inputs, _ = split.read(split.index[rows.to(split.index.device)])
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        return [""] * len(rows)
    return [encode_picture(pixels) for pixels in inputs]


def encode_picture(pixels: Tensor) -> str:
    """Encode an image (1 or 3 channels, height, width) as a PNG in a data URL; floats are spread over their range."""
    values = pixels.detach().cpu()
    if values.dtype != torch.uint8:
        low, high = float(values.min()), float(values.max())
        values = ((values.float() - low) * (255 / max(high - low, 1e-12))).round().to(torch.uint8)
    array = values.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _parse(content: Mapping[str, Any]) -> SampleDetails:
    """Rebuild the details from JSON; raise an error for any value of a wrong type."""
    check_number("temperature", content["temperature"])
    if content["threshold"] is not None:
        check_number("threshold", content["threshold"])
    after = content["after"]
    return SampleDetails(
        float(content["temperature"]),
        content["threshold"],
        tuple(Bin(**_numbers(row)) for row in content["before"]),
        None if after is None else tuple(Bin(**_numbers(row)) for row in after),
        tuple(Coverage(**_numbers(row)) for row in content["coverages"]),
        tuple(_parse_sample(row) for row in content["samples"]),
    )


def _parse_sample(row: Mapping[str, Any]) -> ShownSample:
    votes = tuple(Vote(**vote) for vote in row["votes"])
    names = None if row["names"] is None else tuple(row["names"])
    sample = ShownSample(**{**row, "votes": votes, "names": names})
    check_whole("number", sample.number, 0)
    for text in (sample.truth, sample.guess, *(vote.name for vote in votes), *(names or ())):
        check_type("a class", text, str)
    for value in (sample.probability, sample.entropy, *(vote.probability for vote in votes)):
        check_number("a figure", value)
    for flag in (sample.right, sample.kept, *(vote.right for vote in votes)):
        check_type("a flag", flag, bool)
    if not isinstance(sample.picture, str) or not PICTURE.fullmatch(sample.picture):
        raise ValueError("a picture is not a PNG")
    return sample


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in row.items():
        check_number(name, value)
    return dict(row)
