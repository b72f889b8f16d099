"""`sens predict`: the ensemble's classes of images, with their uncertainty."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalSets
from structured_ensembles.common.inputs import is_several
from structured_ensembles.common.tables import escape_control_characters, text_table
from structured_ensembles.data.arrays import convert_image
from structured_ensembles.data.pictures import convert_mode, crop_middle, open_picture
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.prediction.combination import combine_logits, exact_probabilities, uncertainty_of

MAX_LISTED = 5  # classes of a set


def predict(run: Path, images: list[Path], trust_code: bool = False) -> int:
    """Classify images, and mark those the ensemble is too unsure of.

    Args:
        run: a run folder of sens train, or an ensemble's file
        images: PNG or JPEG files; of images of another size the middle is resized, with a note
        trust_code: let the file import the function that builds its network

    """
    ensemble = Ensemble.load(run / "ensemble.safetensors" if run.is_dir() else run, trust_code=trust_code)
    shape = ensemble.input_shape
    if ensemble.task != "classification" or shape is None or is_several(shape) or len(shape) != 3:
        raise ValueError(
            f"{run} must be an ensemble that classifies images, not one whose inputs have the shape {shape}"
        )
    rows, unreadable = [], 0
    for path in images:
        try:
            pixels, note = read_picture(path, shape)
        except OSError as error:
            print(
                f"sens: {escape_control_characters(str(path))} cannot be read: {escape_control_characters(str(error))}",
                file=sys.stderr,
            )
            unreadable += 1
            continue
        rows.append((escape_control_characters(str(path)), *_cells(ensemble, ensemble.logits(pixels[None])), note))
    if rows:
        sets = ("set",) if _conformal_sets(ensemble) else ()
        columns = ("class", "probability", "entropy", "mutual information", "disagreement", *sets, "verdict")
        print(text_table(("picture", *columns, ""), rows))
        print("".join(f"\n{line}" for line in _legend(ensemble)))
    return 1 if unreadable else 0


def _cells(ensemble: Ensemble, logits: Tensor) -> tuple[str, ...]:
    """Format the table cells of one image from its logits (members, 1, classes)."""
    probability, label = combine_logits(logits, "mean", ensemble.temperature)[0].max(-1)
    uncertainty = uncertainty_of(logits, ensemble.temperature)
    entropy, information, disagreement = (float(values[0]) for values in uncertainty.to_dict().values())
    verdict = "keep" if ensemble.threshold is None or entropy <= ensemble.threshold else "discard"
    figures = (
        f"{100 * float(probability):.1f} %",
        f"{entropy:.3f}",
        f"{information:.3f}",
        f"{100 * disagreement:.0f} %",
    )
    rule = _conformal_sets(ensemble)
    sets: tuple[str, ...] = ()
    if rule is not None:
        chosen = rule.sets(exact_probabilities(logits, ensemble.temperature))[0].nonzero().flatten()
        names = [_name(ensemble, int(class_label)) for class_label in chosen[:MAX_LISTED]]
        more = [f"{len(chosen) - MAX_LISTED} more"] if len(chosen) > MAX_LISTED else []
        sets = ("{" + ", ".join(names + more) + "}",)
    return _name(ensemble, int(label)), *figures, *sets, verdict


def _legend(ensemble: Ensemble) -> list[str]:
    """Explain the columns for this ensemble."""
    lines = [
        f"probability: at a temperature of {ensemble.temperature:.3g}; entropy and mutual information: in nats; "
        "disagreement: pairs of members that name different classes"
    ]
    if rule := _conformal_sets(ensemble):
        lines.append(f"set: holds the right class for {100 * rule.coverage:g} % of pictures such as those of training")
    if ensemble.threshold is not None:
        name, share = ensemble.calibration.threshold_rule or ("", 0.0)
        why = {
            "keep": f", which keeps {100 * share:g} % of what it gets right on held-out pictures",
            "risk": f", below which at most {100 * share:g} % are wrong on held-out pictures",
        }.get(name, "")
        lines.append(f"discard: the entropy is above {ensemble.threshold:.3f}{why}")
    return lines


def _conformal_sets(ensemble: Ensemble) -> ConformalSets | None:
    """Return the conformal rule of an ensemble; None if it has none."""
    rule = ensemble.calibration.conformal
    return rule if isinstance(rule, ConformalSets) else None


def _name(ensemble: Ensemble, label: int) -> str:
    """Return the printable name of a class."""
    return escape_control_characters(ensemble.classes[label]) if ensemble.classes else str(label)


def read_picture(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Read an image as uint8 pixels of `shape` (channels, height, width), and note changes; or raise an OSError."""
    channels, height, width = shape
    notes = []
    picture = _decode(path)
    if picture.has_transparency_data:
        notes.append("transparent parts are white")
    picture = convert_mode(picture, channels)
    if picture.size != (width, height):
        cropped = "cut out of the middle and " if picture.width * height != picture.height * width else ""
        notes.append(f"{cropped}resized from {picture.width}×{picture.height} to {width}×{height}")
        picture = crop_middle(picture, width, height, Image.Resampling.LANCZOS)
    pixels = convert_image(picture)
    if pixels.shape[0] != channels:
        raise OSError(f"the ensemble takes {channels} channels, not {pixels.shape[0]}")
    return pixels.to(torch.uint8), ", ".join(notes)


def _decode(path: Path) -> Image.Image:
    """Decode an image, turned as a viewer shows it; raise an OSError if it cannot be decoded."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")  # a folder, or a pipe that might never end
    Image.init()
    return open_picture(path, [name for name in Image.ID if name != "EPS"])  # EPS is a program
