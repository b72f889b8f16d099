"""`sens evaluate`: the figures of a trained ensemble."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from structured_ensembles import evaluation
from structured_ensembles.cli.printing import figures_table
from structured_ensembles.cli.train import fitting_arguments, read_data
from structured_ensembles.data import Data, load_corrupted
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.files import write_text
from structured_ensembles.models import build_model
from structured_ensembles.runs import machine, read_config

EPSILONS = (0.02, 0.5)  # the paper's
SEVERITIES = (3, 5)


def evaluate(
    run: Path,
    split: Literal["train", "validation", "test"] = "test",
    combine: Literal["mean", "logits", "vote"] = "mean",
    corruptions: list[str] | None = None,
    severities: list[int] | None = None,
    official: str | None = None,
    fgsm: list[float] | None = None,
    ood: str | None = None,
    root: Path | None = None,
    device: str = "auto",
    trust_code: bool = False,
) -> int:
    """Evaluate a trained ensemble; what earlier evaluations found is kept beside it.

    Args:
        run: a run folder of sens train
        split: which part of the data
        combine: the mean of probabilities, of logits, or a vote
        corruptions: accuracy under corruptions: all of them, or those named
        severities: of the corruptions, from 1 to 5; by default 3 and 5
        official: accuracy on official corrupted images: cifar10-c, cifar100-c or tiny-imagenet-c
        fgsm: accuracy under attacks of these strengths; by default 0.02 and 0.5
        ood: a data set to tell apart from the ensemble's own, by name or package.module:function
        root: where data sets are kept
        device: auto, cpu, cuda, …
        trust_code: let the file import the function that makes its network

    """
    from structured_ensembles.devices import pick_device

    config = read_config(run)
    path = run / "ensemble.safetensors"
    ensemble = Ensemble.load(path, trust_code=trust_code)
    ensemble.to(pick_device(device, ensemble))
    data = read_data(config["dataset"], root, config["seed"])
    strengths = severities or SEVERITIES
    figures = evaluation.evaluate(
        ensemble,
        data,
        split,
        combine,
        fgsm=() if fgsm is None else fgsm or EPSILONS,
        corruptions=corruptions is not None and (corruptions or True),
        severities=strengths,
        ood=None if ood is None else read_data(ood, root, config["seed"]),
        base=base_network(config, data, trust_code),
    )
    if official is not None:
        images = load_corrupted(official, root)
        figures |= evaluation.evaluate(ensemble, data, split, combine, corruptions=images, severities=strengths)
    figures["size/file_bytes"] = float(path.stat().st_size)  # as it was stored, perhaps in fewer bits
    record = {"split": split, "combine": combine, **machine()}
    figures = merge_figures(run / f"evaluation-{split}-{combine}.json", figures, record)
    print(figures_table({f"{config['method']}, {split}": figures}))
    return 0


def merge_figures(path: Path, figures: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Write the figures beside those that are in the file already; the new ones win. Returns all of them."""
    earlier: dict[str, float] = {}
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))["figures"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): delete it, and evaluate again") from error
    merged = {**earlier, **figures}
    write_text(path, json.dumps({**record, "figures": merged}, indent=1) + "\n")
    return merged


def base_network(config: Mapping[str, Any], data: Data, trust_code: bool) -> nn.Module | None:
    """The network that the run started from, without its weights; None if only a stranger's code could make it."""
    name = config["model"]
    if ":" in name and not trust_code:
        return None
    arguments = fitting_arguments(name, data, config["model_arguments"])
    with torch.device("meta"):  # only its size is needed
        return build_model(name, **arguments)
