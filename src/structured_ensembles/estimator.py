"""StructuredEnsembleClassifier and StructuredEnsembleRegressor: the walk behind scikit-learn's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from structured_ensembles.build import structured_ensemble
from structured_ensembles.calibration import Calibration
from structured_ensembles.calibration.conformal import Method, fit_intervals, fit_sets
from structured_ensembles.common.checks import check_share, check_type, check_whole
from structured_ensembles.common.devices import Device, device_of
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.common.inputs import call
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.splits import hold_out
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.data.weighted import (
    attach_weights,
    merge_equal_rows,
    repeat_whole,
    weighted_cross_entropy,
    weighted_squared_error,
)
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import copy_for_trial, dtype_of
from structured_ensembles.prediction.calibration_fit import fit_all
from structured_ensembles.prediction.combination import Uncertainty, exact_probabilities
from structured_ensembles.selection import Selection
from structured_ensembles.training import Recipe
from structured_ensembles.zoo import mlp

Factory = Callable[[int, int], nn.Module]  # of the number of features and of outputs
Array = NDArray[Any]
NARROWEST, WIDEST = 64, 256  # hidden layers of the default network
BATCH, FEWEST_STEPS = 200, 8  # samples of a default batch at most, and steps of an epoch where there are fewer


class StructuredEnsemble(BaseEstimator):  # type: ignore[misc]
    """Parameters and training that the classifier and the regressor share; see `StructuredEnsembleClassifier`."""

    model: nn.Module | Factory | None
    members: int
    prune: float | None
    memory: float | None
    selection: Selection
    epochs: int
    batch_size: int | Literal["auto"]
    learning_rate: float
    validation_fraction: float
    early_stopping: bool
    patience: int
    random_state: Any
    device: Device
    verbose: bool

    def _fit(self, inputs: Array, targets: Array, weights: Array, outputs: int, loss: Loss, strata: Array) -> Ensemble:
        """Train an ensemble on distinct rows, calibrate nothing yet, and keep what calibration needs.

        inputs: (rows, features). targets: labels or standardised values, (rows,) or (rows, values). weights, strata:
        (rows,); of every stratum the same share is held out.
        """
        check_share("validation_fraction", self.validation_fraction)
        check_whole("epochs", self.epochs)
        check_whole("patience", self.patience)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        kept, held_out = (
            rows.numpy() for rows in hold_out(torch.from_numpy(strata), float(self.validation_fraction), seed)
        )
        data = Data.from_arrays(
            inputs[kept],
            attach_weights(targets[kept], weights[kept]),
            validation=(inputs[held_out], attach_weights(targets[held_out], weights[held_out])) if len(held_out) else 0,
            task="regression",  # of values and a weight; the loss knows what they mean
            normalization=_standardization(inputs[kept], weights[kept]),
        )
        stopping = self.early_stopping and len(held_out) > 0
        recipe = Recipe(
            epochs=self.epochs,
            batch_size=max(16, min(BATCH, len(kept) // FEWEST_STEPS)) if self.batch_size == "auto" else self.batch_size,
            optimizer="adamw",
            rate=self.learning_rate,
            patience=self.patience if stopping else None,
            keep="best" if stopping else "last",
        )
        ensemble = structured_ensemble(
            self._make_model(inputs.shape[1], outputs, seed),
            data,
            self.members,
            self.prune,
            recipe,
            self.selection,
            memory=self.memory,
            rescale=True,
            loss=loss,
            trained=False,
            device=self.device,
            seed=seed,
            quiet=not self.verbose,
        )
        self.history_ = ensemble.history
        self.n_iter_ = self.history_.epochs if self.history_ is not None else 0
        # In float32 the last digits of a prediction depend on how many samples are predicted together.
        ensemble = ensemble if device_of(ensemble).type == "mps" else ensemble.double()
        ensemble.calibration = Calibration()
        self._held_out_rows, self._kept_rows = held_out, kept
        return ensemble

    def _make_model(self, features: int, outputs: int, seed: int) -> nn.Module:
        """Return the network to cut: the user's, that of a factory, or an MLP sized from the data."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.model is None:
                width = 2 ** int(np.ceil(np.log2(2 * (features + outputs))))
                return mlp(features, outputs, hidden=[int(np.clip(width, NARROWEST, WIDEST))] * 2)
            model = self.model if isinstance(self.model, nn.Module) else self.model(features, outputs)
        check_type("model", model, nn.Module, "give a network, or a function of (n_features, n_outputs) that makes one")
        trial = copy_for_trial(model).eval()
        with torch.no_grad():
            shape = tuple(call(trial, torch.zeros(2, features, dtype=dtype_of(trial), device=device_of(trial))).shape)
        if shape != (2, outputs) and not (outputs == 1 and shape == (2,)):
            raise ValueError(
                f"model must give {outputs} numbers for each sample, (batch, {outputs}), but gives {shape} for a batch "
                "of 2"
            )
        return model

    def _calibrate(self, inputs: Array, targets: Tensor, weights: Array) -> None:
        """Calibrate the ensemble on the rows that were held out, if any, and keep its outputs on them.

        inputs, targets, weights: of all rows. A row of weight 3 counts as three samples.
        """
        held_out = self._held_out_rows[repeat_whole(weights[self._held_out_rows])]
        self._calibration_samples: tuple[Tensor, Tensor] | None = None
        if len(held_out):
            outputs, wanted = self.ensemble_.logits(inputs[held_out]), targets[torch.from_numpy(held_out)]
            self.ensemble_.calibration = fit_all(Calibration(), outputs, wanted, self.ensemble_.task, gaussian=False)
            self._calibration_samples = outputs, wanted

    def _require_held_out(self, method: str) -> tuple[Tensor, Tensor]:
        """Return outputs (members, samples, …) and targets of the samples held out; raise an error without any."""
        if self._calibration_samples is None:
            raise ValueError(
                f"{method} needs samples that were held out, but there are none: fit with a validation_fraction above "
                f"{self.validation_fraction} or more samples"
            )
        return self._calibration_samples

    def _check_inputs(self, X: Any) -> Array:  # noqa: N803
        """Check inputs to predict from, and return them as float32."""
        check_is_fitted(self)
        checked: Array = validate_data(self, X, dtype=np.float32, reset=False)
        return checked

    def _weights(self, sample_weight: Any, X: Array) -> Array:  # noqa: N803
        """Return checked weights (samples,), ones by default."""
        weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weights < 0).any() or not (weights > 0).any():
            least = "some are negative" if (weights < 0).any() else "all are zero"
            raise ValueError(f"sample_weight must have no negative weights and some that are not zero, but {least}")
        return weights

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle writes: networks on the CPU, so that any machine can read them."""
        state: dict[str, Any] = super().__getstate__()
        if "ensemble_" in state and device_of(state["ensemble_"]).type != "cpu":
            state = {**state, "ensemble_": deepcopy(state["ensemble_"]).cpu()}
        return state


class StructuredEnsembleClassifier(ClassifierMixin, StructuredEnsemble):  # type: ignore[misc]
    """A classifier for scikit-learn: an ensemble cut out of one network, calibrated on samples of its own.

    model: the network to cut, or a function of (n_features, n_outputs) that makes one; by default an MLP whose two
        hidden layers are twice as wide as the data, from 64 to 256. Inputs are standardised in any case. It is not
        changed.
    members, prune, memory, selection: see `structured_ensemble`.
    batch_size: "auto" takes at most 200 samples, fewer where an epoch would have less than 8 steps.
    learning_rate: the highest of AdamW, which falls to zero over all epochs.
    validation_fraction: the share of each class that is held out, for early stopping and calibration. 0 trains on all
        samples, without either.
    early_stopping: a member stops after `patience` epochs without a better validation loss, and ends with its best
        weights; else it trains for all epochs. The promise of `predict_set` is exact only without.
    class_weight: a weight by label, or "balanced": each class counts the same.

    Equal samples are one row with their summed weight, so that a weight of 3 is the same as three samples, exactly; an
    epoch goes over distinct rows.

    Fitted: `ensemble_` (takes the same inputs; `ensemble_.save` writes one file), `classes_`, `n_iter_` (epochs),
    `history_`, `n_features_in_`, `feature_names_in_`.
    """

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        members: int = 5,
        prune: float | None = None,
        memory: float | None = None,
        selection: Selection = "learned",
        epochs: int = 100,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 0.003,
        validation_fraction: float = 0.1,
        early_stopping: bool = True,
        patience: int = 20,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        random_state: Any = None,
        device: Device = "auto",
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.members = members
        self.prune = prune
        self.memory = memory
        self.selection = selection
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.early_stopping = early_stopping
        self.patience = patience
        self.class_weight = class_weight
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> StructuredEnsembleClassifier:  # noqa: N803
        """Train on inputs (samples, features) and labels (samples,) of any type; return self."""
        X, y = validate_data(self, X, y, dtype=np.float32)  # noqa: N806
        check_classification_targets(y)
        weights = self._weights(sample_weight, X)
        self.classes_, labels = np.unique(y[weights > 0], return_inverse=True)  # a class without weight is not there
        X, weights = X[weights > 0], weights[weights > 0]  # noqa: N806
        rows, weights = merge_equal_rows(X, labels.astype(np.float64), weights)
        X, labels = X[rows], labels[rows]  # noqa: N806
        costs = weights * self._class_weights(labels, weights)[labels]
        ensemble = self._fit(
            X, labels.astype(np.float64), costs, len(self.classes_), weighted_cross_entropy, strata=labels
        )
        ensemble.task, ensemble.classes = "classification", tuple(map(str, self.classes_.tolist()))
        ensemble.target_shape = ()
        self.ensemble_ = ensemble
        self._calibrate(X, torch.from_numpy(labels), weights)
        return self

    def _class_weights(self, labels: Array, weights: Array) -> Array:
        """Return a weight for each class, (classes,). labels, weights: of the samples, (rows,)."""
        if self.class_weight is None:
            return np.ones(len(self.classes_))
        if isinstance(self.class_weight, str):
            if self.class_weight != "balanced":
                raise ValueError(f"class_weight must be a dict, 'balanced' or None, not {self.class_weight!r}")
            return weights.sum() / (len(self.classes_) * np.bincount(labels, weights))
        by_class = np.array([self.class_weight.get(label, 1.0) for label in self.classes_.tolist()], dtype=np.float64)
        if not (np.isfinite(by_class) & (by_class > 0)).all():
            raise ValueError(f"class_weight must have finite weights above 0, not {self.class_weight!r}")
        return by_class

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return probabilities (samples, classes), calibrated on the samples held out."""
        inputs = self._check_inputs(X)
        probabilities: Array = self.ensemble_.predict_proba(inputs).numpy()
        return probabilities

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the likeliest label of each sample, (samples,)."""
        probabilities = self.predict_proba(X)
        labels: Array = self.classes_[probabilities.argmax(1)]
        return labels

    def predict_uncertainty(self, X: Any) -> Uncertainty:  # noqa: N803
        """Return entropy, mutual information and disagreement of the members, (samples,) each."""
        inputs = self._check_inputs(X)
        return self.ensemble_.uncertainty(inputs)

    def predict_set(self, X: Any, coverage: float = 0.9, method: Method = "aps") -> Array:  # noqa: N803
        """Return the classes that may be right: booleans (samples, classes).

        coverage: how often the true class is among them. method: see `ConformalSets`.
        """
        inputs = self._check_inputs(X)
        temperature = self.ensemble_.temperature
        logits, labels = self._require_held_out("predict_set")
        rule = fit_sets(exact_probabilities(logits, temperature), labels, coverage, method)
        sets: Array = rule.sets(exact_probabilities(self.ensemble_.logits(inputs), temperature)).numpy()
        return sets


class StructuredEnsembleRegressor(RegressorMixin, StructuredEnsemble):  # type: ignore[misc]
    """A regressor for scikit-learn, of one value or several; parameters are those of `StructuredEnsembleClassifier`.

    Targets may be in any units: networks learn them standardised, and errors of each value relative to its deviation.

    Fitted: `ensemble_`, `n_iter_`, `history_`, and `noise_`: the deviation of the targets, (values,), which the members'
    differences do not explain, measured on the samples held out (on the training samples where none are).
    """

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        members: int = 5,
        prune: float | None = None,
        memory: float | None = None,
        selection: Selection = "learned",
        epochs: int = 100,
        batch_size: int | Literal["auto"] = "auto",
        learning_rate: float = 0.003,
        validation_fraction: float = 0.1,
        early_stopping: bool = True,
        patience: int = 20,
        random_state: Any = None,
        device: Device = "auto",
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.members = members
        self.prune = prune
        self.memory = memory
        self.selection = selection
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.early_stopping = early_stopping
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that targets may be several values."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> StructuredEnsembleRegressor:  # noqa: N803
        """Train on inputs (samples, features) and targets (samples,) or (samples, values); return self."""
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)  # noqa: N806
        weights, y = self._weights(sample_weight, X), y.astype(np.float64)
        rows, weights = merge_equal_rows(X, y, weights)
        X, y = X[rows], y[rows]  # noqa: N806
        values = y.reshape(len(y), -1)
        mean = np.average(values, axis=0, weights=weights)
        deviations = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
        deviations[deviations == 0] = 1
        units = Units(tuple(mean.tolist()), float(np.sqrt((deviations**2).mean())))
        loss = partial(weighted_squared_error, deviations=(deviations / units.deviation).tolist())
        standardized = (values - mean) / units.deviation
        strata = np.zeros(len(y), dtype=np.int64)
        ensemble = self._fit(X, standardized, weights, values.shape[1], loss, strata)
        ensemble.units, ensemble.target_shape = units, y.shape[1:]
        self.ensemble_ = ensemble
        self._calibrate(X, torch.from_numpy(y), weights)
        measured = self._held_out_rows if len(self._held_out_rows) else self._kept_rows
        means, spreads = mean_and_spread(ensemble.logits(X[measured]), gaussian=False)
        surplus = (means.numpy().reshape(len(measured), -1) - values[measured]) ** 2 - spreads.numpy().reshape(
            len(measured), -1
        ) ** 2
        self.noise_ = np.sqrt(np.average(surplus, axis=0, weights=weights[measured]).clip(0))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:  # noqa: N803
        """Return the mean of the members, in the shape of the targets; with `return_std` the deviation beside it.

        The deviation is that of a target around the mean: of the members' differences and `noise_`.
        """
        inputs = self._check_inputs(X)
        mean, spread = mean_and_spread(self.ensemble_.logits(inputs), gaussian=False)
        shape = (len(inputs), *(self.ensemble_.target_shape or ()))
        predicted = mean.numpy().reshape(shape)
        if not return_std:
            return predicted
        return predicted, np.hypot(spread.numpy().reshape(len(inputs), -1), self.noise_).reshape(shape)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:  # noqa: N803
        """Return the ends of intervals, in the shape of the targets. coverage: how often the target lies within."""
        inputs = self._check_inputs(X)
        outputs, targets = self._require_held_out("predict_interval")
        rule = fit_intervals(*mean_and_spread(outputs, gaussian=False), targets, coverage)
        low, high = rule.interval(*mean_and_spread(self.ensemble_.logits(inputs), gaussian=False))
        shape = (len(inputs), *(self.ensemble_.target_shape or ()))
        return low.numpy().reshape(shape), high.numpy().reshape(shape)


def _standardization(inputs: Array, weights: Array) -> Normalization:
    """Return the mean and deviation of each column of weighted inputs (rows, features); a constant one's is 1."""
    values = inputs.astype(np.float64)
    first = values[0]  # of a constant column, the mean of what is left is exactly zero
    mean = np.average(values - first, axis=0, weights=weights) + first
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    deviation[(values == first).all(0) | (deviation < np.finfo(np.float32).tiny)] = 1
    return Normalization(tuple(mean.tolist()), tuple(deviation.tolist()))
