"""The HTML page of `sens demo`."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from PIL import Image
from torch import Tensor

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.inputs import join_batches
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of
from structured_ensembles.report.figures import as_svg, draw_entropy_histogram, draw_kept_neurons, draw_reliability
from structured_ensembles.storage.files import write_text


@dataclass(frozen=True)
class Outcome:
    """Trained ensemble with its figures, its file and its training time."""

    title: str
    ensemble: Ensemble
    figures: Mapping[str, float]
    file_bytes: int
    path: Path
    seconds: float


def write_page(path: Path, data: Data, graph: ChannelGraph, outcomes: Sequence[Outcome]) -> Path:
    """Write a self-contained HTML file: comparison, kept channels, calibration, and the most uncertain digits.

    outcomes: ensembles with a temperature, a threshold and conformal sets.
    """
    test = data.split("test")
    inputs = join_batches([inputs for inputs, _ in test.batches(512)])
    structured = next(outcome.ensemble for outcome in outcomes if outcome.ensemble.subnets is not None)
    logits, targets = gather_predictions(structured, test)
    probabilities = combine_logits(logits, "mean", structured.temperature)
    uncertainty = uncertainty_of(logits, structured.temperature)
    correct = probabilities.argmax(-1) == targets
    trained = [outcome for outcome in outcomes if outcome.seconds]
    curves = [(outcome.title, outcome.ensemble.predict_proba(test), targets) for outcome in trained]
    sets = structured.predict_set(test)
    figures = next(outcome.figures for outcome in outcomes if outcome.ensemble is structured)
    template = Environment(autoescape=True).from_string(
        files("structured_ensembles.report").joinpath("demo.html").read_text(encoding="utf-8")
    )
    text = template.render(
        data=data,
        outcomes=outcomes,
        base=graph.num_parameters(),
        kept=as_svg(draw_kept_neurons(structured.subnets or ())),
        reliability=as_svg(draw_reliability(curves)),
        histogram=as_svg(draw_entropy_histogram(uncertainty.entropy, correct, structured.threshold)),
        unsure=[
            {
                "picture": _encode_png(inputs[index]),
                "truth": data.classes[int(targets[index])],
                "guess": data.classes[int(probabilities[index].argmax())],
                "probability": float(probabilities[index].max()),
                "set": ", ".join(data.classes[label] for label in sets[index].nonzero().flatten().tolist()),
                "entropy": float(uncertainty.entropy[index]),
            }
            for index in uncertainty.entropy.argsort(descending=True)[:12].tolist()
        ],
        figures=figures,
        conformal=structured.calibration.conformal,
        held_out=len(data.split("validation")),
        graph=str(graph),
    )
    write_text(path, text)
    return path


def _encode_png(pixels: Tensor) -> str:
    """Encode grey uint8 pixels (1, height, width) as a PNG in a data URL."""
    stream = io.BytesIO()
    Image.fromarray(255 - pixels[0].cpu().numpy()).resize((64, 64), Image.Resampling.NEAREST).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
