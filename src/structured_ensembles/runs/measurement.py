"""Measurements of a trained run: the figures of its splits, without measuring again what is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from structured_ensembles.common.devices import device_of, pick_device
from structured_ensembles.data import Data, load_corrupted
from structured_ensembles.data.corrupted import CorruptedData, has_corrupted
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import corrupt, evaluate
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.corruptions import STANDARD
from structured_ensembles.evaluation.deep_equivalent import compute_calibrated_nlls
from structured_ensembles.evaluation.diversity import disagreement_matrix
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.evaluation.robustness import is_over_all
from structured_ensembles.evaluation.rules import sort_by_rule
from structured_ensembles.prediction.combination import Combine, combine_logits, uncertainty_of
from structured_ensembles.runs.evaluations import RULES, evaluation_path, merge_figures, read_figures
from structured_ensembles.runs.folder import read_config
from structured_ensembles.runs.ingredients import build_base_network, load_run_data, load_run_ensemble
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.runs.samples import read_samples, write_samples
from structured_ensembles.zoo.by_name import Trust


@dataclass(frozen=True)
class Request:
    """Optional measurements on the test split, besides those that are always made; see `evaluate`.

    validation: figures on the validation split too, in files of their own. They are for choosing, if training has not
        chosen its best epoch by the same samples (`keep="last"`).
    members: accuracy and NLL of every member, as `member/0/accuracy`, `member/0/nll`, …
    """

    fgsm: tuple[float, ...] = ()
    corruptions: bool = False
    severities: tuple[int, ...] = (3, 5)
    validation: bool = False
    members: bool = False

    def missing(self, figures: Mapping[str, float], official: bool = False) -> Request:
        """Return the measurements missing from figures of the test split.

        official: corruptions by our code do not count.
        """
        families = ("official",) if official else ("official", "cor")
        attacks = tuple(epsilon for epsilon in self.fgsm if f"adv/fgsm@{epsilon:g}" not in figures)
        severities = tuple(
            severity
            for severity in self.severities
            if self.corruptions and not any(is_over_all(figures, severity, family) for family in families)
        )
        members = self.members and "member/0/accuracy" not in figures
        return Request(attacks, bool(severities), severities, members=members)

    def __or__(self, other: Request) -> Request:
        """Return the union of two requests."""
        fgsm = tuple(dict.fromkeys((*self.fgsm, *other.fgsm)))
        severities = tuple(sorted({*self.severities, *other.severities}))
        return Request(
            fgsm,
            self.corruptions or other.corruptions,
            severities,
            self.validation or other.validation,
            self.members or other.members,
        )


NOTHING = Request((), False, ())  # the missing measurements of a fully measured run


def measure_experiment(
    folder: Path, request: Request, *, root: Path | None = None, device: str = "auto", trust_code: Trust = False
) -> tuple[dict[str, float], bool]:
    """Measure a trained run on the test split, without measuring again what is known; return its figures.

    Both combination rules are measured in one pass and written to `evaluation-test-mean.json` (whose figures are
    returned) and `evaluation-test-logits.json`, the rule of the published figures. `samples.safetensors` holds the
    samples' confidence, entropy and correctness, shapes (samples,), the members' disagreement (members, members), and
    the entropy under strong noise. Corruptions are the official images where they are in the data folder, and computed
    by our code otherwise. Figures on the validation split, where requested, are in `evaluation-validation-mean.json`
    and `evaluation-validation-logits.json`.

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
    base = build_base_network(config, data, trust_code)
    if wanted.validation:
        _measure_validation(folder, ensemble, data, base)
    if (wanted_on_test := find_missing(folder, replace(request, validation=False), official)) is not None:
        corruptions: bool | CorruptedData = wanted_on_test.corruptions
        if official and corruptions:
            corruptions = load_corrupted(f"{config['dataset']}-c", root)
        _measure_test(folder, ensemble, data, base, wanted_on_test, corruptions, noisy=request.corruptions)
    return read_figures(evaluation_path(folder)), True


def _measure_test(
    folder: Path,
    ensemble: Ensemble,
    data: Data,
    base: nn.Module | None,
    wanted: Request,
    corruptions: bool | CorruptedData,
    noisy: bool,
) -> None:
    """Measure a run on the test split, and write its figures and its samples.

    corruptions: True to compute corrupted images, or the official ones. noisy: entropies under strong noise too.
    """
    severities = wanted.severities or (3,)
    figures = evaluate(
        ensemble, data, combine=RULES, fgsm=wanted.fgsm, corruptions=corruptions, severities=severities, base=base
    )
    if data.task == "classification":
        logits, targets = gather_predictions(ensemble, data.split("test"))
        figures |= figures_of_first_members(logits, targets)
        if wanted.members:
            by_member = compute_member_figures(logits, targets)
            figures |= {f"{name}{rule}": value for name, value in by_member.items() for rule in ("", f"/{RULES[1]}")}
        if data.validation is not None:
            nlls = compute_calibrated_nlls(gather_predictions(ensemble, data.validation), (logits, targets))
            figures |= {f"first/{number}/nll_t": nll for number, nll in enumerate(nlls, start=1)}
        _write_samples(folder, ensemble, data, logits, targets, noisy)
    figures["size/file_bytes"] = float((folder / "ensemble.safetensors").stat().st_size)
    _write_figures(folder, ensemble, data, "test", figures)


def _measure_validation(folder: Path, ensemble: Ensemble, data: Data, base: nn.Module | None) -> None:
    """Measure a run on the validation split, and write all figures that nothing fitted to that split enters."""
    figures = evaluate(ensemble, data, "validation", combine=RULES, base=base)
    _write_figures(folder, ensemble, data, "validation", figures)


def _write_figures(
    folder: Path, ensemble: Ensemble, data: Data, split: SplitName, figures: Mapping[str, float]
) -> None:
    """Merge the figures of a split into its files, one for each combination rule."""
    rules = RULES if data.task == "classification" else RULES[:1]
    for rule, rule_figures in sort_by_rule(figures, rules).items():
        record = {"split": split, "combine": rule, **describe_machine(device_of(ensemble))}
        merge_figures(evaluation_path(folder, rule, split), rule_figures, record)


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
    missing = replace(missing, validation=lacks_validation(folder, request, known))
    complete = all("size/overhead" in figures for figures in known.values()) and (samples or regression)
    if missing != NOTHING or not complete:
        return missing
    return missing if request.corruptions and "noisy" not in samples else None


def lacks_validation(folder: Path, request: Request, rules: Iterable[Combine] = RULES) -> bool:
    """Tell whether requested figures on the validation split are missing, by any of the combination rules."""
    return request.validation and not all(read_figures(evaluation_path(folder, rule, "validation")) for rule in rules)


def compute_member_figures(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute the accuracy and the NLL of every member from logits (members, samples, classes)."""
    figures: dict[str, float] = {}
    for number, member_logits in enumerate(logits):
        probabilities = combine_logits(member_logits[None])
        figures |= {
            f"member/{number}/accuracy": float((probabilities.argmax(-1) == targets).double().mean()),
            f"member/{number}/nll": negative_log_likelihood(probabilities, targets),
        }
    return figures


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
    """Write what figures of single samples need: logits (members, samples, classes), targets (samples,).

    noisy: entropies under strong noise too. Those that were measured before are kept in any case.
    """
    known = read_samples(folder)
    probabilities = combine_logits(logits)
    confidence, labels = probabilities.max(-1)
    tensors: dict[str, Tensor] = {
        "confidence": confidence.float(),
        "correct": labels == targets,
        "entropy": uncertainty_of(logits).entropy.float(),
        "disagreement": disagreement_matrix(logits).float(),
    }
    if "noisy" in known:
        tensors["noisy"] = known["noisy"]
    elif noisy:

        def noise(images: Tensor, _: Tensor, first: int) -> Tensor:
            return corrupt(images, "gaussian_noise", 5, first=first)

        outputs, _ = gather_predictions(ensemble, data.split("test"), change=noise)
        tensors["noisy"] = uncertainty_of(outputs).entropy.float()
    write_samples(folder, tensors)
