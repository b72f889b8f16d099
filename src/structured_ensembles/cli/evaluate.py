"""`sens evaluate`: the figures of a trained ensemble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from structured_ensembles import evaluation
from structured_ensembles.cli.printing import figures_table
from structured_ensembles.cli.train import read_data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.files import write_text
from structured_ensembles.runs import machine, read_config


def evaluate(
    run: Path,
    split: Literal["train", "validation", "test"] = "test",
    combine: Literal["mean", "logits", "vote"] = "mean",
    root: Path | None = None,
    device: str = "auto",
    trust_code: bool = False,
) -> int:
    """Evaluate a trained ensemble.

    Args:
        run: a run folder of sens train
        split: which part of the data
        combine: the mean of probabilities, of logits, or a vote
        root: where data sets are kept
        device: auto, cpu, cuda, …
        trust_code: let the file import the function that makes its network

    """
    from structured_ensembles.devices import pick_device

    config = read_config(run)
    ensemble = Ensemble.load(run / "ensemble.safetensors", trust_code=trust_code)
    ensemble.to(pick_device(device, ensemble))
    data = read_data(config["dataset"], root, config["seed"])
    figures = evaluation.evaluate(ensemble, data, split, combine)
    record = {"split": split, "combine": combine, "figures": figures, **machine()}
    write_text(run / f"evaluation-{split}-{combine}.json", json.dumps(record, indent=1) + "\n")
    print(figures_table({f"{config['method']}, {split}": figures}))
    return 0
