"""`sens demo`: the whole walk on real digits, in about a minute on a laptop."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from structured_ensembles import zoo
from structured_ensembles.channels import trace
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.digits import read_digits
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import evaluate
from structured_ensembles.methods import METHODS
from structured_ensembles.report.demo_page import Outcome, write_demo_page
from structured_ensembles.training import Recipe

EPOCHS = 20
COVERAGE = 0.99  # of the prediction sets: with less than the accuracy, most sets would have one class


def demo(out: Path = Path("runs/demo"), seed: int = 0, epochs: int = EPOCHS) -> int:
    """Train one network, a deep ensemble and a structured ensemble on digits, and compare them.

    Args:
        out: the folder for the ensembles and report.html
        seed: of all random numbers
        epochs: how long to train

    """
    start = time.perf_counter()
    recipe = Recipe.named("modern", epochs=epochs, augmentation="crop")  # raises if epochs is wrong
    # On the usual 359 test images even a perfect ensemble has an ECE of 2 %: half of the images shows calibration.
    data = read_digits(seed, test_share=1 / 2, validation_share=1 / 3)
    torch.manual_seed(seed)
    model = zoo.resnet20(num_classes=data.num_classes, in_channels=1)
    graph = trace(model, data.example())
    print(f"{len(data.train):,} images of handwritten digits to learn from, and a ResNet20 whose channels are:")
    print(f"\n{graph}\n")

    titles = {"single": "one network", "deep": "deep ensemble of 5", "structured": "structured ensemble of 5"}
    outcomes: list[Outcome] = []
    for method, title in titles.items():
        print(f"training: {title} …", flush=True)
        structured_only = {"trained": False} if method == "structured" else {}  # new weights
        training_start = time.perf_counter()
        ensemble: Ensemble = METHODS[method](model, data, members=5, recipe=recipe, seed=seed, **structured_only)
        seconds = time.perf_counter() - training_start
        ensemble.conformal(data, COVERAGE)
        path = out / f"{method}.safetensors"
        outcomes.append(Outcome(title, ensemble, evaluate(ensemble, data), ensemble.save(path), path, seconds))
    int8_path = out / "structured-int8.safetensors"
    int8_bytes = outcomes[-1].ensemble.save(int8_path, dtype="int8")
    reloaded = Ensemble.load(int8_path)
    outcomes.append(Outcome("… stored as int8", reloaded, evaluate(reloaded, data), int8_bytes, int8_path, 0.0))

    print("\n" + text_table(("", *HEADER), [(outcome.title, *format_cells(outcome)) for outcome in outcomes]))
    print(
        f"T: after a temperature fitted to {len(data.split('validation'))} held-out images; "
        f"coverage: of conformal sets that promise {100 * COVERAGE:g} %"
    )
    page = write_demo_page(out / "report.html", data, graph, outcomes)
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Look at {page}")
    print("Next, for your own network and data:\n  sens train --help\n  sens models\n  sens datasets")
    return 0


HEADER = ("accuracy", "ECE", "ECE, T", "NLL", "NLL, T", "T", "coverage", "set size", "parameters", "file", "seconds")


def format_cells(outcome: Outcome) -> tuple[str, ...]:
    """Format the cells of a row under HEADER."""
    values = outcome.figures
    return (
        f"{100 * values['cls/accuracy']:.2f} %",
        f"{100 * values['cal/ece']:.2f} %",
        f"{100 * values['cal/ece_t']:.2f} %",
        f"{values['cal/nll']:.4f}",
        f"{values['cal/nll_t']:.4f}",
        f"{outcome.ensemble.temperature:.2f}",
        f"{100 * values['conf/coverage']:.1f} %",
        f"{values['conf/size']:.2f}",
        f"{values['size/parameters']:,.0f}",
        f"{outcome.file_bytes / 1024:,.0f} KiB",
        f"{outcome.seconds:.1f}" if outcome.seconds else "",
    )
