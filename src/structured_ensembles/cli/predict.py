"""`sens predict`: what an ensemble says about pictures, and whether it knows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalSets
from structured_ensembles.common.inputs import is_several
from structured_ensembles.common.tables import printable, text_table
from structured_ensembles.data.arrays import convert_image
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.prediction.combination import combine_logits, exact_probabilities, uncertainty_of

MOST_NAMED = 5  # classes of a set that are listed


def predict(run: Path, images: list[Path], trust_code: bool = False) -> int:
    """Classify pictures; those the ensemble is too unsure of are marked.

    Args:
        run: a run folder of sens train, or an ensemble's file
        images: PNG or JPEG files; another size is resized, and said so
        trust_code: let the file import the function that makes its network

    """
    ensemble = Ensemble.load(run / "ensemble.safetensors" if run.is_dir() else run, trust_code=trust_code)
    shape = ensemble.input_shape
    if ensemble.task != "classification" or shape is None or is_several(shape) or len(shape) != 3:
        raise ValueError(f"{run} does not classify pictures: its inputs have the shape {shape}")
    rows, unreadable = [], 0
    for path in images:
        try:
            pixels, note = read_picture(path, shape)
        except OSError as error:
            print(f"sens: {printable(str(path))} cannot be read: {printable(str(error))}", file=sys.stderr)
            unreadable += 1
            continue
        rows.append((printable(str(path)), *_cells(ensemble, ensemble.logits(pixels[None])), note))
    if rows:
        sets = ("set",) if _sets(ensemble) else ()
        columns = ("class", "probability", "entropy", "mutual information", "disagreement", *sets, "verdict")
        print(text_table(("picture", *columns, ""), rows))
        print("".join(f"\n{line}" for line in _legend(ensemble)))
    return 1 if unreadable else 0


def _cells(ensemble: Ensemble, logits: Tensor) -> tuple[str, ...]:
    """Format the table cells of one picture, from its members' logits (members, 1, classes)."""
    probability, label = combine_logits(logits, "mean", ensemble.temperature)[0].max(-1)
    unsure = uncertainty_of(logits, ensemble.temperature)
    entropy, information, differing = (float(own[0]) for own in unsure.to_dict().values())
    verdict = "keep" if ensemble.threshold is None or entropy <= ensemble.threshold else "discard"
    figures = (f"{100 * float(probability):.1f} %", f"{entropy:.3f}", f"{information:.3f}", f"{100 * differing:.0f} %")
    rule = _sets(ensemble)
    sets: tuple[str, ...] = ()
    if rule is not None:
        chosen = rule.sets(exact_probabilities(logits, ensemble.temperature))[0].nonzero().flatten()
        names = [_name(ensemble, int(own)) for own in chosen[:MOST_NAMED]]
        more = [f"{len(chosen) - MOST_NAMED} more"] if len(chosen) > MOST_NAMED else []
        sets = ("{" + ", ".join(names + more) + "}",)
    return _name(ensemble, int(label)), *figures, *sets, verdict


def _legend(ensemble: Ensemble) -> list[str]:
    """Explain the columns for this ensemble."""
    lines = [
        f"probability: at a temperature of {ensemble.temperature:.3g}; entropy and mutual information: in nats; "
        "disagreement: pairs of members that name different classes"
    ]
    if rule := _sets(ensemble):
        lines.append(f"set: holds the right class for {100 * rule.coverage:g} % of pictures such as those of training")
    if ensemble.threshold is not None:
        name, share = ensemble.calibration.threshold_rule or ("", 0.0)
        why = {
            "keep": f", which keeps {100 * share:g} % of what it gets right on held-out pictures",
            "risk": f", below which at most {100 * share:g} % are wrong on held-out pictures",
        }.get(name, "")
        lines.append(f"discard: the entropy is above {ensemble.threshold:.3f}{why}")
    return lines


def _sets(ensemble: Ensemble) -> ConformalSets | None:
    rule = ensemble.calibration.conformal
    return rule if isinstance(rule, ConformalSets) else None


def _name(ensemble: Ensemble, label: int) -> str:
    return printable(ensemble.classes[label]) if ensemble.classes else str(label)


def read_picture(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Read a picture as uint8 pixels of `shape` (channels, height, width), and what was done to it; or an OSError."""
    channels, height, width = shape
    notes = []
    picture = _eight_bits(_decoded(path))
    if picture.has_transparency_data:
        notes.append("transparent parts are white")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        notes.append(f"resized from {picture.size[0]}×{picture.size[1]} to {width}×{height}")
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    pixels = convert_image(picture)
    if pixels.shape[0] != channels:
        raise OSError(f"the ensemble wants {channels} channels")
    return pixels.to(torch.uint8), ", ".join(notes)


def _decoded(path: Path) -> Image.Image:
    """Read any picture the right way up, as a viewer shows it; OSError if it is none."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")  # a folder, or a pipe, which might never end
    Image.init()
    try:
        with Image.open(path, formats=[own for own in Image.ID if own != "EPS"]) as opened:  # EPS is a program
            opened.load()
            return ImageOps.exif_transpose(opened)
    except OSError:
        raise
    except Exception as error:  # damaged ones make Pillow's many readers raise anything
        raise OSError(f"it is damaged, or too large: {error or type(error).__name__}") from error


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Of one that has more, the upper eight; Pillow would cut off whatever is above 255."""
    if picture.mode == "F":
        raise OSError("its pixels are floats, and nothing says from where to where")
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise OSError(f"its pixels go from {values.min()} to {values.max()}: they must have 8 or 16 bits")
    deep = picture.mode != "I" or values.max() > 255  # some readers give 16 bits as 32
    return Image.fromarray((values // 257 if deep else values).astype(np.uint8))
