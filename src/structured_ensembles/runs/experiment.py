"""Experiments: a data set, a network, a method and a seed; trained once in a folder, evaluated any number of times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import pick_device
from structured_ensembles.common.processes import gather, rank
from structured_ensembles.data import Data, load_corrupted
from structured_ensembles.data.corrupted import has_corrupted
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import corrupt, evaluate
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.corruptions import STANDARD
from structured_ensembles.evaluation.deep_equivalent import compute_calibrated_nlls
from structured_ensembles.evaluation.diversity import disagreement_matrix
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.evaluation.robustness import is_over_all
from structured_ensembles.evaluation.rules import sort_by_rule
from structured_ensembles.methods import METHODS
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of
from structured_ensembles.runs.evaluations import RULES, evaluation_path, merge_figures, read_figures
from structured_ensembles.runs.folder import (
    close_run,
    describe_machine,
    open_run,
    read_config,
    read_samples,
    write_samples,
)
from structured_ensembles.runs.ingredients import (
    add_data_arguments,
    build_base_network,
    load_run_data,
    load_run_ensemble,
    read_data,
)
from structured_ensembles.runs.settings import (
    Defaults,
    check_method_arguments,
    make_folder_name,
    read_defaults,
    takes_execution,
)
from structured_ensembles.storage.weight_encoding import Storage
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.mesh import join_processes
from structured_ensembles.training.recipe import default_recipe_name
from structured_ensembles.zoo.by_name import Trust, build_model, find_function, find_model


@dataclass(frozen=True)
class Experiment:
    """Settings that determine the figures of a run.

    dataset, model, method: names, or `package.module:function`. limit: the largest number of training samples.
    validation: False trains on the validation samples too; then no best epoch is chosen and nothing is calibrated.
    recipe: the name of one, or "auto" for the task's usual one. changes: fields of it that are changed.
    execution: how training is computed. `config.yaml` has all of it, unless it is the default.
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
    execution: Execution = field(default_factory=Execution)

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.yaml`; settings added later are left out at their defaults."""
        config = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        config["execution"] = self.execution.to_dict()
        defaults = {"limit": None, "validation": True, "execution": Execution().to_dict()}
        return {name: value for name, value in config.items() if name not in defaults or value != defaults[name]}

    @property
    def folder(self) -> str:
        """Return a name for its run folder that no other experiment has."""
        words = [self.dataset, self.model, self.method, f"{self.members}x"]
        recipe, execution = {"recipe": self.recipe}, self.execution.changes()
        for settings in (self.model_arguments, self.method_arguments, recipe, self.changes, execution):
            words += [f"{name}={value}" for name, value in settings.items()]
        words += [] if self.storage == "float32" else [f"storage={self.storage}"]
        words += [] if self.limit is None else [f"limit={self.limit}"]
        words += [] if self.validation else ["all-images"]
        return "-".join([*words, str(self.seed)]).replace(":", ".").replace("/", ".").replace(" ", "")


@dataclass(frozen=True)
class Request:
    """Optional measurements on the test split, besides those that are always made; see `evaluate`."""

    fgsm: tuple[float, ...] = ()
    corruptions: bool = False
    severities: tuple[int, ...] = (3, 5)

    def missing(self, figures: Mapping[str, float], official: bool = False) -> Request:
        """Return the measurements missing from the figures; with `official`, corruptions by our code do not count."""
        families = ("official",) if official else ("official", "cor")
        attacks = tuple(epsilon for epsilon in self.fgsm if f"adv/fgsm@{epsilon:g}" not in figures)
        severities = tuple(
            severity
            for severity in self.severities
            if self.corruptions and not any(is_over_all(figures, severity, family) for family in families)
        )
        return Request(attacks, bool(severities), severities)

    def __or__(self, other: Request) -> Request:
        """Return the union of two requests."""
        fgsm = tuple(dict.fromkeys((*self.fgsm, *other.fgsm)))
        severities = tuple(sorted({*self.severities, *other.severities}))
        return Request(fgsm, self.corruptions or other.corruptions, severities)


NOTHING = Request((), False, ())  # the missing measurements of a fully measured run


@dataclass(frozen=True)
class Prepared:
    """Checked experiment with its method, data, network and recipe; the recipe is no longer "auto"."""

    experiment: Experiment
    make: Callable[..., Ensemble]
    data: Data
    network: nn.Module
    recipe: Recipe
    device: str
    defaults: Defaults

    @property
    def folder(self) -> str:
        """Return a name for its run folder: data set, model, method, non-default settings, seed."""
        experiment = self.experiment
        config = experiment.config()
        changed: dict[str, Any] = {}
        changed |= {"members": experiment.members} if experiment.members != Experiment.members else {}
        changed |= {f"model.{name}": value for name, value in self.defaults.changed(config, "model_arguments").items()}
        changed |= self.defaults.changed(config, "method_arguments")
        changed |= {"recipe": experiment.recipe} if experiment.recipe != default_recipe_name(self.data.task) else {}
        settings = [(name, "recipe", value) for name, value in self.defaults.changed(config, "changes").items()]
        settings += [(name, "execution", value) for name, value in experiment.execution.changes().items()]
        for name, family, value in sorted(settings):  # sorted together, as when all were settings of the recipe
            changed[f"{family}.{name}" if name in changed else name] = value
        changed |= {"storage": experiment.storage} if experiment.storage != Experiment.storage else {}
        changed |= {"limit": experiment.limit} if experiment.limit is not None else {}
        changed |= {} if experiment.validation else {"validation": False}
        return make_folder_name([experiment.dataset, experiment.model, experiment.method], changed, experiment.seed)


def prepare_experiment(experiment: Experiment, *, root: Path | None = None, device: str = "auto") -> Prepared:
    """Check all arguments of an experiment before any work, and read its data."""
    automatic = experiment.recipe == "auto"
    Recipe.named("modern" if automatic else experiment.recipe, **experiment.changes)  # raises if it is wrong
    check_whole("members", experiment.members)
    check_seed(experiment.seed)
    make = find_function("method", experiment.method, METHODS)
    check_method_arguments(experiment.method, make, experiment.method_arguments)
    if experiment.execution != Execution() and not takes_execution(make):
        raise ValueError(
            f"execution must be left out, or method {experiment.method!r} must take execution=: it would ignore "
            f"{experiment.execution}"
        )
    data = read_data(experiment.dataset, root, experiment.seed, experiment.limit, experiment.validation)
    data.split("test")  # raises without one: figures are measured there
    if automatic:
        experiment = replace(experiment, recipe=default_recipe_name(data.task))
    torch.manual_seed(experiment.seed)
    arguments = add_data_arguments(experiment.model, data, experiment.model_arguments)
    network = build_model(experiment.model, **arguments)
    defaults = Defaults(
        model_arguments=read_defaults(find_model(experiment.model)) | add_data_arguments(experiment.model, data, {}),
        method_arguments=read_defaults(make),
        changes=Recipe.named(experiment.recipe).to_dict(),
    )
    recipe = Recipe.named(experiment.recipe, **experiment.changes)
    pick_device(device, network)  # raises if it is wrong
    return Prepared(experiment, make, data, network, recipe, device, defaults)


def train_experiment(
    experiment: Experiment, folder: Path, *, root: Path | None = None, device: str = "auto", quiet: bool = False
) -> tuple[dict[str, Any], bool]:
    """Train an experiment, or resume it in its folder; return the results, and whether there was anything to do.

    In a group of processes (`torchrun`), all take part and the first one writes.
    """
    return train_prepared(prepare_experiment(experiment, root=root, device=device), folder, quiet=quiet)


def train_prepared(prepared: Prepared, folder: Path, *, quiet: bool = False) -> tuple[dict[str, Any], bool]:
    """Train a checked experiment, as `train_experiment` does."""
    experiment = prepared.experiment
    with join_processes(), _open_in_first_process(prepared, folder) as result:
        done = gather(result)[0]
        if done is not None:
            return done, False
        start = time.perf_counter()
        execution = {"execution": experiment.execution} if takes_execution(prepared.make) else {}
        ensemble = prepared.make(
            prepared.network,
            prepared.data,
            members=experiment.members,
            recipe=prepared.recipe,
            seed=experiment.seed,
            device=prepared.device,
            folder=folder,
            quiet=quiet,
            **execution,
            **experiment.method_arguments,
        )
        if rank() == 0:
            seconds = time.perf_counter() - start
            precision = experiment.execution.precision_on(pick_device(prepared.device, prepared.network))
            done = close_run(folder, ensemble, prepared.data, seconds, experiment.storage, precision)
        return gather(done)[0], True


@contextmanager
def _open_in_first_process(prepared: Prepared, folder: Path) -> Iterator[dict[str, Any] | None]:
    """Open the run folder in the first of several processes, see `open_run`."""
    if rank() > 0:
        yield None
        return
    with open_run(folder, prepared.experiment.config(), prepared.defaults.comparable) as result:
        yield result


def measure_experiment(
    folder: Path, request: Request, *, root: Path | None = None, device: str = "auto", trust_code: Trust = False
) -> tuple[dict[str, float], bool]:
    """Measure a trained run on the test split, without measuring again what is known; return its figures.

    Both combination rules are measured in one pass and written to `evaluation-test-mean.json` (whose figures are
    returned) and `evaluation-test-logits.json`, the rule of the published figures. `samples.safetensors` holds the
    samples' confidence, entropy and correctness, shapes (samples,), the members' disagreement (members, members), and
    the entropy under strong noise. Corruptions are the official images where they are in the data folder, and computed
    by our code otherwise.

    trust_code: let the folder's files import the functions that they name (`package.module:function`): all of them, or
        only the listed ones, which the caller named too.
    """
    config = read_config(folder)
    official = request.corruptions and has_official(config["dataset"], root)
    wanted = find_missing(folder, request, official)
    if wanted is None:
        return read_figures(evaluation_path(folder)), False
    data = load_run_data(folder, config, root, trust_code)
    ensemble = load_run_ensemble(folder, config, data, trust_code)
    ensemble.to(pick_device(device, ensemble))
    figures = evaluate(
        ensemble,
        data,
        combine=RULES,
        fgsm=wanted.fgsm,
        corruptions=load_corrupted(f"{config['dataset']}-c", root)
        if official and wanted.corruptions
        else wanted.corruptions,
        severities=wanted.severities or (3,),
        base=build_base_network(config, data, trust_code),
    )
    if data.task == "classification":
        logits, targets = gather_predictions(ensemble, data.split("test"))
        figures |= figures_of_first_members(logits, targets)
        if data.validation is not None:
            nlls = compute_calibrated_nlls(gather_predictions(ensemble, data.validation), (logits, targets))
            figures |= {f"first/{number}/nll_t": nll for number, nll in enumerate(nlls, start=1)}
        _write_samples(folder, ensemble, data, logits, targets, noisy=request.corruptions)
    figures["size/file_bytes"] = float((folder / "ensemble.safetensors").stat().st_size)
    rules = RULES if data.task == "classification" else RULES[:1]
    by_rule = {
        rule: merge_figures(
            evaluation_path(folder, rule), rule_figures, {"split": "test", "combine": rule, **describe_machine()}
        )
        for rule, rule_figures in sort_by_rule(figures, rules).items()
    }
    return by_rule["mean"], True


def has_official(dataset: str, root: Path | None) -> bool:
    """Tell whether the data folder holds the official corrupted images of a data set."""
    return has_corrupted(f"{dataset}-c", root, STANDARD)


def find_missing(folder: Path, request: Request, official: bool = False) -> Request | None:
    """Return the measurements that a run still lacks; None if it has all of them and the ones always made."""
    samples, known = read_samples(folder), {rule: read_figures(evaluation_path(folder, rule)) for rule in RULES}
    regression = bool(known["mean"]) and "cls/accuracy" not in known["mean"]
    if regression:
        del known["logits"]  # a regression has one combination rule and no figures of single samples
    missing = NOTHING
    for figures in known.values():
        missing |= request.missing(figures, official)
    complete = all("size/overhead" in figures for figures in known.values()) and (samples or regression)
    if missing != NOTHING or not complete:
        return missing
    return missing if request.corruptions and "noisy" not in samples else None


def figures_of_first_members(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute figures of the first 1, 2, … members: an ensemble of five tells about smaller ones too."""
    figures: dict[str, float] = {}
    for number in range(1, len(logits) + 1):
        probabilities = combine_logits(logits[:number])
        figures |= {
            f"first/{number}/accuracy": float((probabilities.argmax(-1) == targets).double().mean()),
            f"first/{number}/nll": negative_log_likelihood(probabilities, targets),
            f"first/{number}/ece": expected_calibration_error(probabilities, targets),
        }
    return figures


def _write_samples(folder: Path, ensemble: Ensemble, data: Data, logits: Tensor, targets: Tensor, noisy: bool) -> None:
    """Write what figures of single samples need: logits (members, samples, classes), targets (samples,)."""
    probabilities = combine_logits(logits)
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

        outputs, _ = gather_predictions(ensemble, data.split("test"), change=noise)
        tensors["noisy"] = uncertainty_of(outputs).entropy.float()
    write_samples(folder, tensors)
