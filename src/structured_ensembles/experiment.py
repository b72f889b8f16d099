"""One experiment: a data set, a network, a method, a seed; trained once in a folder, evaluated as often as wanted."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.artifact import Storage
from structured_ensembles.data import Data, load_corrupted, load_data
from structured_ensembles.data.corrupted import has_corrupted
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.devices import pick_device
from structured_ensembles.ensemble import Combine, Ensemble, combined, uncertainty_of
from structured_ensembles.evaluation import corrupt, evaluate
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.corruptions import STANDARD
from structured_ensembles.evaluation.deep_equivalent import calibrated_nlls
from structured_ensembles.evaluation.diversity import disagreement_matrix
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.evaluation.robustness import is_over_all, mean_of
from structured_ensembles.evaluation.rules import figures_by_rule
from structured_ensembles.files import write_tensors, write_text
from structured_ensembles.methods import METHODS
from structured_ensembles.models import build_model, find_function
from structured_ensembles.parallel import gather, rank
from structured_ensembles.records import check_figures
from structured_ensembles.runs import (
    SAMPLES,
    close_run,
    drop_run_without_progress,
    machine,
    open_run,
    read_config,
    read_samples,
)
from structured_ensembles.several import is_several
from structured_ensembles.training import Recipe
from structured_ensembles.training.mesh import processes
from structured_ensembles.training.recipe import usual

RULES: tuple[Combine, ...] = ("mean", "logits")  # of combination: ours, and that of the published figures


@dataclass(frozen=True)
class Experiment:
    """What decides the figures of a run.

    dataset, model, method: names, or `package.module:function`. limit: at most so many training samples.
    validation: False trains on the validation samples too; then nothing chooses the best epoch, and nothing is
        calibrated.
    recipe: the name of one, or "auto" for the task's usual one. changes: parts of it that are changed.
    storage: how weights are stored in the ensemble's file.
    """

    dataset: str
    model: str
    method: str
    seed: int = 0
    members: int = 5
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    method_arguments: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = "modern"
    changes: Mapping[str, Any] = field(default_factory=dict)
    storage: Storage = "float32"
    limit: int | None = None
    validation: bool = True

    def config(self) -> dict[str, Any]:
        """As `config.yaml` has it."""
        own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        usual = {"limit": None, "validation": True}
        return {name: value for name, value in own.items() if name not in usual or value != usual[name]}

    @property
    def folder(self) -> str:
        """A name for its run folder that tells it from every other experiment."""
        parts = [self.dataset, self.model, self.method, f"{self.members}x"]
        for settings in (self.model_arguments, self.method_arguments, {"recipe": self.recipe}, self.changes):
            parts += [f"{name}={value}" for name, value in settings.items()]
        parts += [] if self.limit is None else [f"limit={self.limit}"]
        parts += [] if self.validation else ["all-images"]
        return "-".join([*parts, str(self.seed)]).replace(":", ".").replace("/", ".").replace(" ", "")


@dataclass(frozen=True)
class Request:
    """What to measure on the test split, besides what is always measured; see `evaluate`."""

    fgsm: tuple[float, ...] = ()
    corruptions: bool = False
    severities: tuple[int, ...] = (3, 5)

    def missing(self, figures: Mapping[str, float], official: bool = False) -> Request:
        """Return the part not among the figures yet; with `official`, our own corruptions do not count."""
        kinds = ("official",) if official else ("official", "cor")
        attacks = tuple(epsilon for epsilon in self.fgsm if f"adv/fgsm@{epsilon:g}" not in figures)
        severities = tuple(
            own
            for own in self.severities
            if self.corruptions and not any(is_over_all(figures, own, kind) for kind in kinds)
        )
        return Request(attacks, bool(severities), severities)

    def __or__(self, other: Request) -> Request:
        """Return the union of two requests."""
        fgsm = tuple(dict.fromkeys((*self.fgsm, *other.fgsm)))
        severities = tuple(sorted({*self.severities, *other.severities}))
        return Request(fgsm, self.corruptions or other.corruptions, severities)


def train_experiment(
    experiment: Experiment, folder: Path, *, root: Path | None = None, device: str = "auto", quiet: bool = False
) -> tuple[dict[str, Any], bool]:
    """Train, or go on with what lies in the folder; returns the results, and whether there was anything to do.

    In a group of processes (`torchrun`), all take part, and the first one writes.
    """
    automatic = experiment.recipe == "auto"
    Recipe.named("modern" if automatic else experiment.recipe, **experiment.changes)  # or an error, before any work
    make = find_function("method", experiment.method, METHODS)
    data = read_data(experiment.dataset, root, experiment.seed, experiment.limit, experiment.validation)
    data.split("test")  # or an error: what it can do is measured there
    if automatic:
        experiment = replace(experiment, recipe=usual(data.task))
    recipe = Recipe.named(experiment.recipe, **experiment.changes)
    torch.manual_seed(experiment.seed)
    arguments = fitting_arguments(experiment.model, data, experiment.model_arguments)
    network = build_model(experiment.model, **arguments)
    with processes():
        done = gather(open_run(folder, experiment.config()) if rank() == 0 else None)[0]
        if done is not None:
            return done, False
        start = time.perf_counter()
        try:
            ensemble = make(
                network,
                data,
                members=experiment.members,
                recipe=recipe,
                seed=experiment.seed,
                device=device,
                folder=folder,
                quiet=quiet,
                **experiment.method_arguments,
            )
        except Exception:
            if rank() == 0:
                drop_run_without_progress(folder)
            raise
        if rank() == 0:
            precision = recipe.precision_on(pick_device(device, network))
            done = close_run(folder, ensemble, data, time.perf_counter() - start, experiment.storage, precision)
        return gather(done)[0], True


def measure_experiment(
    folder: Path, request: Request, *, root: Path | None = None, device: str = "auto", trust_code: bool = False
) -> tuple[dict[str, float], bool]:
    """The figures of a trained run on the test split; what is known already is not measured again.

    Both rules of combination are measured in one pass, in `evaluation-test-mean.json` (whose figures are returned) and
    `evaluation-test-logits.json`, the rule of the published figures. Beside them it leaves `samples.safetensors`, what
    figures of single samples need: their confidence, entropy and whether they are right, shapes (samples,), the
    members' disagreement (members, members), and the entropy under strong noise. Corruptions are the official images
    where they are in the data folder, and our own otherwise.
    """
    config = read_config(folder)
    official = request.corruptions and has_official(config["dataset"], root)
    wanted = unmeasured(folder, request, official)
    if wanted is None:
        return read_figures(evaluation_path(folder)), False
    ensemble = Ensemble.load(folder / "ensemble.safetensors", trust_code=trust_code)
    ensemble.to(pick_device(device, ensemble))
    data = read_data(config["dataset"], root, config["seed"], config.get("limit"), config.get("validation", True))
    figures = evaluate(
        ensemble,
        data,
        combine=RULES,
        fgsm=wanted.fgsm,
        corruptions=load_corrupted(f"{config['dataset']}-c", root)
        if official and wanted.corruptions
        else wanted.corruptions,
        severities=wanted.severities or (3,),
        base=base_network(config, data, trust_code),
    )
    if data.task == "classification":
        logits, targets = predictions(ensemble, data.split("test"))
        figures |= _first_members(logits, targets)
        if data.validation is not None:
            nlls = calibrated_nlls(predictions(ensemble, data.validation), (logits, targets))
            figures |= {f"first/{number}/nll_t": nll for number, nll in enumerate(nlls, start=1)}
        _write_samples(folder / SAMPLES, ensemble, data, logits, targets, noisy=request.corruptions)
    figures["size/file_bytes"] = float((folder / "ensemble.safetensors").stat().st_size)
    rules = RULES if data.task == "classification" else RULES[:1]
    found = {
        rule: merge_figures(evaluation_path(folder, rule), own, {"split": "test", "combine": rule, **machine()})
        for rule, own in figures_by_rule(figures, rules).items()
    }
    return found["mean"], True


def evaluation_path(folder: Path, rule: Combine = "mean") -> Path:
    """Return the path of the figures of a run on the test split."""
    return folder / f"evaluation-test-{rule}.json"


def has_official(dataset: str, root: Path | None) -> bool:
    """Tell whether the data folder holds the official corrupted images of a data set."""
    return has_corrupted(f"{dataset}-c", root, STANDARD)


def unmeasured(folder: Path, request: Request, official: bool = False) -> Request | None:
    """Return the part of a request that a run still lacks; None if it lacks nothing, unrequested figures included."""
    samples, known = read_samples(folder), {rule: read_figures(evaluation_path(folder, rule)) for rule in RULES}
    regression = bool(known["mean"]) and "cls/accuracy" not in known["mean"]
    if regression:
        del known["logits"]  # there is nothing to combine in two ways, and no figure of single samples
    nothing = Request((), False, ())
    wanted = nothing
    for figures in known.values():
        wanted |= request.missing(figures, official)
    whole = all("size/overhead" in figures for figures in known.values()) and (samples or regression)
    if wanted != nothing or not whole:
        return wanted
    return wanted if request.corruptions and "noisy" not in samples else None


def read_data(dataset: str, root: Path | None, seed: int, limit: int | None = None, validation: bool = True) -> Data:
    """A data set by name, or from `package.module:function`; with at most `limit` training samples.

    validation: False joins the validation samples to the training samples.
    """
    if ":" in dataset:
        data = find_function("dataset", dataset, {})()
        if not isinstance(data, Data):
            raise TypeError(f"dataset {dataset} must give a Data, not a {type(data).__name__}")
    else:
        data = load_data(dataset, root, seed=seed)
    if not validation:
        data = _without_validation(data)
    if limit is None or limit >= len(data.train):
        return data
    if limit < 1 or not isinstance(data.train, TensorSplit):
        raise ValueError(f"limit must be at least 1, and the data in memory, not {limit!r}")
    return replace(data, train=replace(data.train, index=data.train.index[:limit]))


def _without_validation(data: Data) -> Data:
    train, validation = data.train, data.validation
    if validation is None:
        return data
    held_out = isinstance(train, TensorSplit) and isinstance(validation, TensorSplit)
    if not held_out or train.inputs is not validation.inputs:  # type: ignore[attr-defined]
        raise ValueError("validation=False needs data in memory whose validation samples were held out of the training")
    index = torch.cat([train.index, validation.index])  # type: ignore[attr-defined]
    return replace(data, train=replace(train, index=index), validation=None)  # type: ignore[type-var]


def fitting_arguments(model: str, data: Data, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that follow from the data, for a model of the zoo; a user's own function gets what it was given."""
    if ":" in model:
        return dict(given)
    shape = data.shape
    if is_several(shape):
        raise ValueError(f"model {model!r} of the zoo takes one input, but the data have several: give one of your own")
    fitting: dict[str, Any] = {"num_classes": data.num_classes or 1}
    if model == "mlp":
        fitting["in_features"] = math.prod(shape)
    else:
        fitting["in_channels"] = shape[0]
    return {**fitting, **given}


def base_network(config: Mapping[str, Any], data: Data, trust_code: bool = False) -> nn.Module | None:
    """The network that the run started from, without its weights; None if only a stranger's code could make it."""
    name = config["model"]
    if ":" in name and not trust_code:
        return None
    arguments = fitting_arguments(name, data, config.get("model_arguments", {}))
    with torch.device("meta"):  # only its size is needed
        return build_model(name, **arguments)


def read_figures(path: Path) -> dict[str, float]:
    """The figures of an evaluation; none if there was none."""
    if not path.exists():
        return {}
    try:
        return check_figures(json.loads(path.read_text(encoding="utf-8"))["figures"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and evaluate again") from error


def merge_figures(path: Path, figures: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Write the figures beside those that are in the file already; the new ones win. Returns all of them."""
    known = read_figures(path)
    merged = _without_partial_means({**known, **figures}, known, figures)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_text(path, json.dumps({**before, **record, "figures": merged}, indent=1) + "\n")
    return merged


def _without_partial_means(
    merged: Mapping[str, float], known: Mapping[str, float], figures: Mapping[str, float]
) -> dict[str, float]:
    """Of the means over corruptions (`cor/mean@3`, …), those that are over all that the merged figures list."""

    def listed(own: Mapping[str, float], kind: str, mean: str, severity: str) -> set[str]:
        names = {name.removeprefix(f"{kind}/").partition("@")[0] for name in own if name.startswith(f"{kind}/")}
        own_names = {name for name in names - {"mean", "extra_mean"} if mean_of(name) == mean}
        return {name for name in own_names if f"{kind}/{name}@{severity}" in own}

    result = dict(merged)
    for name in [name for name in merged if "mean@" in name]:
        kind, mean, severity = re.split("[/@]", name)[:3]
        everything = listed(merged, kind, mean, severity)
        whole = [own for own in (figures, known) if name in own and listed(own, kind, mean, severity) == everything]
        if whole:
            result[name] = whole[0][name]
        elif everything:
            del result[name]
    return result


def _first_members(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """What the first 1, 2, … members make together: an ensemble of five tells about smaller ones too."""
    found: dict[str, float] = {}
    for number in range(1, len(logits) + 1):
        probabilities = combined(logits[:number])
        found |= {
            f"first/{number}/accuracy": float((probabilities.argmax(-1) == targets).double().mean()),
            f"first/{number}/nll": negative_log_likelihood(probabilities, targets),
            f"first/{number}/ece": expected_calibration_error(probabilities, targets),
        }
    return found


def _write_samples(path: Path, ensemble: Ensemble, data: Data, logits: Tensor, targets: Tensor, noisy: bool) -> None:
    probabilities = combined(logits)
    confidence, labels = probabilities.max(-1)
    tensors: dict[str, Tensor] = {
        "confidence": confidence.float(),
        "correct": labels == targets,
        "entropy": uncertainty_of(logits).entropy.float(),
        "disagreement": disagreement_matrix(logits).float(),
    }
    if noisy:

        def noise(images: Tensor, _: Tensor, first: int) -> Tensor:
            return corrupt(images, "gaussian_noise", 5, first=first)

        outputs, _ = predictions(ensemble, data.split("test"), change=noise)
        tensors["noisy"] = uncertainty_of(outputs).entropy.float()
    write_tensors(path, tensors, {})
