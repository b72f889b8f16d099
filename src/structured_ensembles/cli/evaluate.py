"""`sens evaluate`: the figures of a trained ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from structured_ensembles import evaluation
from structured_ensembles.cli.printing import format_figures
from structured_ensembles.common.checks import check_choice
from structured_ensembles.data import load_corrupted
from structured_ensembles.data.corrupted import CORRUPTED_SETS
from structured_ensembles.evaluation.checks import check_official
from structured_ensembles.evaluation.corruptions import ORIGIN
from structured_ensembles.runs.evaluations import is_fitted, merge_figures
from structured_ensembles.runs.folder import read_config
from structured_ensembles.runs.ingredients import build_base_network, load_run_data, load_run_ensemble, read_data
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.zoo.by_name import Trust

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
    """Evaluate a trained ensemble; figures of earlier evaluations are kept.

    Args:
        run: a run folder of sens train
        split: the split of the data; validation leaves out the figures of temperature, thresholds and conformal sets,
            which were fitted to it
        combine: the mean of probabilities, of logits, or a vote
        corruptions: accuracy under corruptions: all of them, or the named ones
        severities: of the corruptions, from 1 to 5; by default 3 and 5
        official: accuracy on official corrupted images: cifar10-c, cifar100-c or tiny-imagenet-c
        fgsm: accuracy under attacks of these strengths; by default 0.02 and 0.5
        ood: a data set to tell apart from the ensemble's own, by name, folder:PATH or package.module:function
        root: where data sets are kept
        device: auto, cpu, cuda, …
        trust_code: let the folder import the functions that build its network and its data

    """
    from structured_ensembles.common.devices import device_of, pick_device

    if severities is not None and corruptions is None and official is None:
        raise ValueError("--severities are those of --corruptions or --official: give one of these, too")
    if official is not None:
        check_choice("--official", official, list(CORRUPTED_SETS))
    config = read_config(run)
    path = run / "ensemble.safetensors"
    trusted: Trust = trust_code or ([] if ood is None else [ood])  # the user named it here
    data = load_run_data(run, config, root, trusted)
    if official is not None:
        check_official(CORRUPTED_SETS[official], data)  # before gigabytes are downloaded
    ensemble = load_run_ensemble(run, config, data, trusted)
    ensemble.to(pick_device(device, ensemble))
    images = None if official is None else load_corrupted(official, root)
    measured_severities = severities or SEVERITIES
    figures = evaluation.evaluate(
        ensemble,
        data,
        split,
        combine,
        fgsm=() if fgsm is None else fgsm or EPSILONS,
        corruptions=corruptions is not None and (corruptions or True),
        severities=measured_severities,
        ood=None if ood is None else read_data(ood, root, config["seed"]),
        base=build_base_network(config, data, trusted),
    )
    if images is not None:
        figures |= evaluation.evaluate(
            ensemble, data, split, combine, corruptions=images, severities=measured_severities
        )
    figures["size/file_bytes"] = float(path.stat().st_size)  # of the stored file, perhaps with fewer bits per weight
    settings = {"split": split, "combine": combine, **({} if ood is None else {"ood": ood})}
    record = {**settings, **describe_machine(device_of(ensemble))}
    merged = merge_figures(run / f"evaluation-{split}-{combine}.json", figures, record)
    print(format_figures({f"{config['method']}, {split}": merged}))
    if fitted := sorted(name for name in figures.keys() - merged.keys() if is_fitted(name)):
        print(f"\nleft out, since what they depend on was fitted to the validation split: {', '.join(fitted)}")
    if any(name.startswith("cor/") for name in merged):
        print(f"\ncor/mean is over the 15 standard corruptions, cor/extra_mean over the four extra ones. {ORIGIN}")
    return 0
