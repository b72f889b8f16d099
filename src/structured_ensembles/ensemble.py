"""Ensemble: networks that predict together, with calibrated probabilities and an uncertainty for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.artifact import Contents, load, save
from structured_ensembles.calibration import (
    Calibration,
    check_temperature,
    check_threshold,
    choose_threshold_rule,
    repeat_for_rules,
)
from structured_ensembles.calibration.conformal import ConformalIntervals, ConformalSets, Method, check_conformal
from structured_ensembles.common.checks import check_choice, check_flags, check_type
from structured_ensembles.common.gaussian import Gaussians, gaussian_nll, mean_and_spread
from structured_ensembles.common.inputs import Inputs, batch_from, clone_inputs, is_several
from structured_ensembles.cuda.prediction_graphs import Replays
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.assembly import Task
from structured_ensembles.data.conversion import check_bytes
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.data.kinds import Kinds, Normalizations
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.preparation import prepare_inputs
from structured_ensembles.data.target_scaling import Units, restore_outputs
from structured_ensembles.examination.embedding_ids import embedding_size
from structured_ensembles.hub.folder import save_folder
from structured_ensembles.hub.repository import find_pretrained, push
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.provenance import count_base_parameters
from structured_ensembles.prediction.calibration_fit import (
    fit_calibration,
    fit_conformal,
    fit_threshold_rule,
)
from structured_ensembles.prediction.combination import (
    COMBINE,
    Combine,
    Uncertainty,
    combine_logits,
    exact_probabilities,
    member_outputs,
    uncertainty_of,
)
from structured_ensembles.prediction.description import format_ensemble, format_ensemble_line
from structured_ensembles.prediction.ensemble_state import encode_extra, pop_extra
from structured_ensembles.prediction.held_out import HeldOut, check_labels, gather_outputs, read_held_out
from structured_ensembles.prediction.input_checks import (
    cast_as_trained,
    check_classification,
    check_regression,
    warn_of_unknown_inputs,
)
from structured_ensembles.prediction.outputs import compute_outputs, reshape_like_targets
from structured_ensembles.prediction.undecided import check_decided
from structured_ensembles.selection import Subnet
from structured_ensembles.storage.weight_encoding import Storage
from structured_ensembles.training.history import History

NO_CONFORMAL = "conformal(data, coverage=0.9) fits them, as training does on a validation split of at least 9 samples"


class Ensemble(nn.Module):
    """Networks with the same inputs and outputs.

    networks: the members. One network may stand for several, see `member_outputs`.
    subnets: the channels of the base network that each member has, where members were cut out of one.
    classes, task, normalization: those of the training data; `train` sets them.
    threshold: an entropy above which a prediction is better discarded; `train` sets it from the validation split.
    calibration: that threshold, the temperature and the conformal sets; see `calibrate`.
    units: mean and deviation of a regression's targets, where members give standardised values; the ensemble converts
        them back. `train` sets them.
    gaussian: whether members of a regression have Gaussian heads: a mean and a raw variance for every value, see
        `gaussian_nll`. `train(…, loss=gaussian_nll)` says so too.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        subnets: Sequence[Subnet] | None = None,
        classes: Sequence[str] = (),
        task: Task = "classification",
        normalization: Normalization | Normalizations | None = None,
        threshold: float | None = None,
        units: Units | None = None,
        gaussian: bool = False,
    ) -> None:
        super().__init__()
        check_flags(gaussian=gaussian)
        check_choice("task", task, get_args(Task))
        if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
            raise TypeError("networks must be a list of networks, not one of them: Ensemble([network])")
        networks = list(networks)
        if not networks:
            raise ValueError("networks must hold at least one network")
        for network in networks:
            check_type("each of networks", network, nn.Module)
        if normalization is not None and not isinstance(normalization, Normalizations):
            check_type("normalization", normalization, Normalization, "such as that of data: data.normalization")
        if subnets is not None and len(subnets) != len(networks):
            raise ValueError(f"subnets must have one for each of the {len(networks)} networks, not {len(subnets)}")
        self.members = nn.ModuleList(networks)
        self.subnets = None if subnets is None else tuple(subnets)
        self.classes = tuple(map(str, classes))
        self.task: Task = task
        self.normalization = normalization
        threshold = check_threshold(threshold)
        self.calibration = Calibration(threshold=threshold, paper_threshold=threshold)
        self.units = units
        self.gaussian = gaussian
        self.input_shape: Any = None  # a tuple of sizes; of several inputs, a tuple or dict of shapes
        self.input_kinds: Kinds | None = None  # of several inputs: pixels, whole numbers, mask or floats
        self.ids = False  # whether inputs are whole numbers, such as tokens
        self.pixels = False  # whether they are uint8 pixels, or floats in [0,1] in place of them
        self.id_limit: Any = None  # ids must be below it; of several inputs, a limit or None for each
        self.target_shape: tuple[int, ...] | None = None  # of one target of a regression
        self.history: History | None = None  # of its training
        self.replays = Replays()

    def __len__(self) -> int:
        return sum(getattr(member, "num_members", 1) for member in self.members)

    def __repr__(self) -> str:
        return format_ensemble_line(self)

    def __str__(self) -> str:
        return format_ensemble(self)

    def forward(self, *x: Any, **keywords: Any) -> Tensor:
        """Return outputs (members, batch, classes) for inputs (batch, …) as users have them: uint8, or floats in [0,1].

        Several inputs come as a tuple or a dict, or as the arguments that the members take. With Gaussian heads outputs
        are (members, batch, 2 * values): means, then deviations, both in the units of the targets.
        On a GPU, without gradients, members run side by side; shapes that recur run as a CUDA graph.
        """
        inputs = batch_from(x, keywords)
        outputs = self.replays.outputs(self, inputs)
        if outputs is None:
            batch = self.prepare(inputs)
            outputs = torch.cat([member_outputs(member, clone_inputs(batch)) for member in self.members])
        return restore_outputs(outputs, self.units, self.gaussian)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in encode_extra(self.normalization, self.units, self.gaussian, self.calibration).items():
            destination[f"{prefix}{name}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        normalization, self.units, self.gaussian, calibration = pop_extra(state_dict, prefix)
        self.normalization = normalization or self.normalization
        if calibration is not None:
            self.calibration = calibration
        elif self.calibration.fitted:  # for other weights than these
            self.calibration = Calibration()
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Ensemble:
        """Drop the CUDA graphs, since weights may move to another device or dtype."""
        self.replays.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def prepare(self, x: Inputs) -> Any:
        """Convert inputs to what the members get: normalised floats, or ids."""
        if self.pixels and isinstance(x, Tensor):
            check_bytes("x", x)
        elif self.input_shape is not None and not self.ids:
            x = cast_as_trained(x, self.normalization, self.input_kinds)
        return prepare_inputs(x, dtype_of(self), self.normalization, self.ids, self.input_kinds)

    def adopt(self, data: Data, loss: Loss | None = None) -> Loss | None:
        """Copy what a saved ensemble must know of its data: classes, task, normalisation, shapes, range of ids.

        A calibration that was fitted to other data is dropped.
        loss: of the training, which tells whether there are Gaussian heads. Returns the loss to train with, which is
        `gaussian_nll` for Gaussian heads if none was given.
        """
        if self.calibration.fitted:
            self.calibration = Calibration()
        self.classes, self.task, self.normalization = data.classes, data.task, data.normalization
        self.input_shape, self.ids, self.target_shape = data.shape, data.ids, data.target_shape
        self.pixels = data.pixels
        self.input_kinds = data.kinds if is_several(self.input_shape) else None
        has_ids = self.ids or self.input_kinds is not None
        self.id_limit = embedding_size(self.members[0], data) if has_ids else None
        if data.task != "regression":
            self.units, self.gaussian = None, False
        elif loss is not None:
            self.gaussian = loss is gaussian_nll
        return gaussian_nll if self.gaussian else loss

    # Prediction -----------------------------------------------------------------------------------------------------

    def logits(self, x: Any, batch_size: int = 512) -> Tensor:
        """Return outputs (members, samples, classes) for arrays, tensors, datasets or loaders, in evaluation mode.

        x: for networks of several inputs a tuple or dict of arrays, or a dataset or loader of such.
        """
        return compute_outputs(self, x, batch_size)

    def predict_proba(
        self, x: Any, combine: Combine = "mean", batch_size: int = 512, temperature: float | None = None
    ) -> Tensor:
        """Return probabilities (samples, classes): by the mean of the members' probabilities or logits, or by votes.

        temperature: by default the one that `calibrate` has fitted for this rule; 1.0 for none. Votes have none.
        """
        check_choice("combine", combine, COMBINE)
        check_classification(self.task, "predict_proba")
        temperature = self.calibration.temperature_for(combine, temperature)
        return combine_logits(self.logits(x, batch_size), combine, temperature)

    def predict(self, x: Any, combine: Combine = "mean", batch_size: int = 512) -> Tensor:
        """Return labels (samples,); for regression the mean of the members' values, in the shape of the targets.

        Outputs that are NaN have no label: a ValueError says for how many samples; `predict_proba` gives NaN for them.
        """
        if self.task == "regression":
            return reshape_like_targets(
                self.target_shape, mean_and_spread(self.logits(x, batch_size), self.gaussian)[0]
            )
        probabilities = self.predict_proba(x, combine, batch_size, temperature=1.0)  # a temperature changes no label
        return check_decided(probabilities, "predict").argmax(-1)

    def uncertainty(self, x: Any, batch_size: int = 512, temperature: float | None = None) -> Uncertainty:
        """Return the uncertainty of each sample; temperature: as in `predict_proba`."""
        check_classification(self.task, "uncertainty")
        temperature = self.calibration.temperature_for("mean", temperature)
        return uncertainty_of(self.logits(x, batch_size), temperature)

    def spread(self, x: Any, batch_size: int = 512) -> Tensor:
        """Return, for regression, the standard deviation of the members' values, in the shape of the targets.

        With Gaussian heads it is the deviation of a target, noise included; `distribution` has its components.
        """
        check_regression(self.task, "spread")
        return reshape_like_targets(self.target_shape, mean_and_spread(self.logits(x, batch_size), self.gaussian)[1])

    def distribution(self, x: Any, batch_size: int = 512) -> Gaussians:
        """Return, for Gaussian heads, predicted distributions: mean, deviation and its components, NLL, intervals."""
        if not self.gaussian:
            raise ValueError(
                "distribution needs networks that give a mean and a variance, trained with loss=gaussian_nll; "
                "this ensemble has predict and spread"
            )
        return Gaussians.from_outputs(self.logits(x, batch_size))

    def keep(self, x: Any, batch_size: int = 512) -> Tensor:
        """Tell which predictions to keep: booleans (samples,), true where the entropy is at most `threshold`."""
        check_classification(self.task, "keep")
        if self.threshold is None:
            raise ValueError("there is no threshold yet: threshold_for(data, keep=0.95) fits one")
        return self.uncertainty(x, batch_size).entropy.double() <= self.threshold

    def predict_set(self, x: Any, batch_size: int = 512) -> Tensor:
        """Return the prediction sets that `conformal` has fitted: booleans (samples, classes)."""
        if self.task == "regression":
            raise ValueError("predict_set is for classification; for regression there is predict_interval")
        rule = self.calibration.conformal
        if not isinstance(rule, ConformalSets):
            raise ValueError(f"there are no prediction sets yet: {NO_CONFORMAL}")
        probabilities = exact_probabilities(self.logits(x, batch_size), self.temperature)
        return rule.sets(check_decided(probabilities, "predict_set"))

    def predict_interval(self, x: Any, batch_size: int = 512) -> tuple[Tensor, Tensor]:
        """Return, for regression, ends of the intervals that `conformal` has fitted, in the shape of the targets."""
        check_regression(self.task, "predict_interval")
        rule = self.calibration.conformal
        if not isinstance(rule, ConformalIntervals):
            raise ValueError(f"there are no intervals yet: {NO_CONFORMAL}")
        low, high = rule.interval(*mean_and_spread(self.logits(x, batch_size), self.gaussian))
        return reshape_like_targets(self.target_shape, low), reshape_like_targets(self.target_shape, high)

    # Calibration ----------------------------------------------------------------------------------------------------

    @property
    def temperature(self) -> float:
        """Return the temperature of the rule "mean"; 1.0 where none was fitted.

        Setting it sets that of every combination rule, and drops the threshold and the conformal sets, which were
        fitted at another temperature; `calibrate(data, temperature=…)` refits them.
        """
        return self.calibration.temperature("mean")

    @temperature.setter
    def temperature(self, value: float) -> None:
        temperatures = repeat_for_rules(check_temperature(value))
        self.calibration = Calibration(temperatures, paper_threshold=self.calibration.paper_threshold)

    @property
    def threshold(self) -> float | None:
        """Return the entropy, after temperature, above which a prediction is better discarded."""
        return self.calibration.threshold

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        self.calibration = replace(self.calibration, threshold=check_threshold(value), threshold_rule=None)

    def calibrate(self, data: HeldOut, split: SplitName = "validation", temperature: float | None = None) -> float:
        """Fit the temperature of the combined prediction, keep it, and return that of the rule "mean".

        data: its `split`, or a pair of arrays (inputs, targets) that nothing was trained on.

        The rule "logits" gets a temperature of its own. What depends on the temperature is fitted again, on the same
        split: the threshold, by the rule it had (`threshold_for`; keep=0.95 by default), and any sets of `conformal`.

        `train` and every method do this where there is a validation split. The same samples have chosen the best epoch,
        so that the ensemble looks somewhat better on them than on new ones; where that matters, give others as a
        pair. The temperature minimises the negative log-likelihood exactly; where fewer than three samples are wrong,
        which tells too little, a weak prior keeps it near 1 (see `fit_supported_temperature`).

        temperature: use this one instead of fitting it; 1.0 for none.
        """
        temperature = None if temperature is None else check_temperature(temperature)
        check_classification(self.task, "calibrate")
        self.calibration = fit_calibration(self.calibration, *self._held_out(data, split), temperature)
        return self.temperature

    def threshold_for(
        self,
        data: HeldOut,
        *,
        keep: float | None = None,
        risk: float | None = None,
        split: SplitName = "validation",
    ) -> float:
        """Fit, keep and return the entropy above which predictions are discarded (see `keep`).

        keep: the share of the right predictions on the split that stay below it; or
        risk: as many predictions stay as possible, while at most this share of them is wrong on the split. That is
            measured there, not a promise for new samples.
        """
        rule = choose_threshold_rule(keep, risk)
        check_classification(self.task, "threshold_for")
        self.calibration, threshold = fit_threshold_rule(self.calibration, *self._held_out(data, split), rule)
        return threshold

    def conformal(
        self,
        data: HeldOut,
        coverage: float = 0.9,
        method: Method = "thr",
        *,
        penalty: float = 0.01,
        free_ranks: int = 5,
        split: SplitName = "validation",
    ) -> ConformalSets | ConformalIntervals:
        """Fit, keep and return the sets of `predict_set`, or for regression the intervals of `predict_interval`.

        coverage: how often they hold the truth. method, penalty, free_ranks: see `ConformalSets`; intervals are scaled
        by the members' spread, see `ConformalIntervals`. The promise is exact for samples that no other choice was
        based on; the validation split has chosen the best epoch and the temperature.
        """
        check_conformal(coverage, method, penalty, free_ranks)
        if self.task == "regression" and method != "thr":
            raise ValueError(f"method must be left out for a regression, whose intervals have only one, not {method!r}")
        outputs, targets = self._held_out(data, split)
        rule = fit_conformal(
            self.calibration,
            outputs,
            targets,
            self.task,
            self.gaussian,
            coverage=coverage,
            method=method,
            penalty=penalty,
            free_ranks=free_ranks,
        )
        self.calibration = replace(self.calibration, conformal=rule)
        return rule

    def _held_out(self, data: HeldOut, split: SplitName) -> tuple[Tensor, Tensor]:
        """Return outputs (members, samples, …) and targets (samples, …) of held-out samples, checked."""
        samples = read_held_out(data, split, self.task, self.ids, self.pixels)
        if isinstance(data, Data):
            warn_of_unknown_inputs(self, data)
        outputs, targets = gather_outputs(lambda inputs, *_: self.logits(inputs), samples)
        check_labels(outputs, targets)
        return outputs, targets

    # Size and storage -----------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of all members."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def base_parameters(self) -> int | None:
        """Return the number of parameters of the network that the members were cut out of, None if they were not."""
        return count_base_parameters(list(self.members))

    def overhead(self, base: nn.Module) -> float:
        """Return the ratio of trainable parameters to those of one base network."""
        check_type("base", base, nn.Module)
        trainable, of_base = (sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (self, base))
        if of_base == 0:
            raise ValueError("base must have parameters that require gradients, but has none")
        return trainable / of_base

    def _contents(self) -> Contents:
        """Return what a file of the ensemble keeps."""
        attributes = {field.name: getattr(self, field.name) for field in fields(Contents) if field.name != "networks"}
        return Contents(list(self.members), **attributes)

    def save(self, path: str | Path, dtype: Storage = "float32") -> int:
        """Write one safetensors file; return its size in bytes. See `artifact.save`."""
        return save(self._contents(), path, dtype)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None, trust_code: bool = False) -> Ensemble:
        """Read a file that `save` wrote; no pickle. See `artifact.load`."""
        return load(path, _from_contents, model, trust_code)

    def save_pretrained(self, folder: str | Path, dtype: Storage = "float32", **card: Any) -> Path:
        """Write a folder for sharing: file, config.json, model card (figures=, dataset=); see `hub.folder`."""
        return save_folder(self._contents(), folder, dtype, **card)

    def push_to_hub(self, repo: str, *, private: bool = False, message: str | None = None, **options: Any) -> str:
        """Upload what `save_pretrained` writes, with its options, to "owner/name"; see `hub.repository.push`."""
        return push(repo, lambda folder: self.save_pretrained(folder, repo=repo, **options), private, message)

    @classmethod
    def from_pretrained(cls, folder_or_repo: str | Path, revision: str | None = None, **options: Any) -> Ensemble:
        """Load such a folder or repository, with the options of `load`; see `hub.repository.find_pretrained`."""
        return cls.load(find_pretrained(folder_or_repo, revision), **options)


def _from_contents(contents: Contents) -> Ensemble:
    """Build an ensemble from the contents of its file."""
    ensemble = Ensemble(list(contents.networks), subnets=contents.subnets)
    for field in fields(Contents):
        if field.name not in ("networks", "subnets"):
            setattr(ensemble, field.name, getattr(contents, field.name))
    return ensemble
