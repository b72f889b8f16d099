"""StructuredEnsembleRegressor: an ensemble cut out of one network, as a regressor of scikit-learn."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import nn

from structured_ensembles.calibration.conformal import fit_intervals
from structured_ensembles.common.checks import check_flags
from structured_ensembles.common.devices import Device
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.data.weighted import merge_equal_rows, weighted_squared_error
from structured_ensembles.estimators.base import Array, Factory, StructuredEnsemble
from structured_ensembles.estimators.last_layers import find_last_layers, scale_rows
from structured_ensembles.selection import Selection

MOST_DIFFERENT = 10  # ratio of deviations that a network can learn at their scales


class StructuredEnsembleRegressor(RegressorMixin, StructuredEnsemble):  # type: ignore[misc]
    """A regressor for scikit-learn, of one value or several; parameters are those of `StructuredEnsembleClassifier`.

    Targets may be in any units: networks learn them standardised, and errors of each value relative to its deviation.

    Fitted: `ensemble_`, `n_iter_`, `history_`, and `noise_`: the deviation of the targets, (values,), that the members'
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
        learning_rate: float = 0.01,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> StructuredEnsembleRegressor:
        """Train on inputs (samples, features) and targets (samples,) or (samples, values); return self."""
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        weights, y = self._weights(sample_weight, X), y.astype(np.float64)
        rows, weights = merge_equal_rows(X, y, weights)
        X, y = X[rows], y[rows]
        values = y.reshape(len(y), -1)
        units, relative = units_of(values, weights)
        seed = self._draw_seed()
        model = self._make_model(X.shape[1], values.shape[1], seed)
        # Each value is learned with a deviation of 1; afterwards the rows of the last layers bring it to its scale.
        # Where these cannot, it is learned at its scale, which works for values of about the same deviation only.
        last_layers = find_last_layers(model, X.shape[1], values.shape[1]) if values.shape[1] > 1 else ()
        scales = np.where(relative > 0, relative, 1.0)
        if not last_layers and scales.max() > MOST_DIFFERENT * scales.min():
            warnings.warn(
                f"the deviations of y's values are up to {scales.max() / scales.min():.3g} times as large as others, "
                "which this model cannot learn well, as no linear layer gives its outputs: end it with one, or scale y",
                stacklevel=2,
            )
        learned_at = np.ones_like(scales) if last_layers else scales
        loss = partial(weighted_squared_error, deviations=learned_at.tolist())
        standardized = (values - units.mean) / (units.deviation * (scales / learned_at))
        strata = np.zeros(len(y), dtype=np.int64)
        self.ensemble_, held_out = self._train(model, X, standardized, weights, strata, loss, seed)
        for member in self.ensemble_.members:
            scale_rows(member, last_layers, torch.from_numpy(relative))
        self.ensemble_.units, self.ensemble_.target_shape = units, y.shape[1:]
        self._calibrate(X[held_out], y[held_out], weights[held_out])
        measured = held_out if len(held_out) else np.arange(len(y))
        self.noise_ = self._measure_noise(X[measured], values[measured], weights[measured])
        return self

    def _measure_noise(self, inputs: Array, values: Array, weights: Array) -> Array:
        """Return the deviation that the members' differences do not explain, (values,).

        inputs: (rows, features). values: targets (rows, values). weights: (rows,).
        """
        mean, spread = self._mean_and_spread(inputs)
        unexplained: Array = np.average((mean - values) ** 2 - spread**2, axis=0, weights=weights)
        return np.sqrt(unexplained.clip(0))

    def _mean_and_spread(self, inputs: Array) -> tuple[Array, Array]:
        """Return mean and deviation of the members, (samples, values) each, for inputs (samples, features)."""
        mean, spread = mean_and_spread(self.ensemble_.logits(inputs), gaussian=False)
        return mean.numpy(), spread.numpy()

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the mean of the members, in the shape of the targets; with `return_std` the deviation beside it.

        The deviation is that of a target around the mean: of the members' differences and `noise_`.
        """
        check_flags(return_std=return_std)
        inputs = self._check_inputs(X)
        mean, spread = self._mean_and_spread(inputs)
        shape = (len(inputs), *(self.ensemble_.target_shape or ()))
        if not return_std:
            return mean.reshape(shape)
        return mean.reshape(shape), np.hypot(spread, self.noise_).reshape(shape)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """Return the lower and upper ends of intervals, in the shape of the targets.

        coverage: how often the target lies within, on average over samples and over draws of those held out. These also
            choose the epoch of early stopping and that of the search for selection="learned", so that it may be
            slightly less often.
        """
        inputs = self._check_inputs(X)
        outputs, targets = self._require_held_out("predict_interval")
        rule = fit_intervals(*mean_and_spread(outputs, gaussian=False), targets, coverage)
        low, high = rule.interval(*mean_and_spread(self.ensemble_.logits(inputs), gaussian=False))
        shape = (len(inputs), *(self.ensemble_.target_shape or ()))
        return low.numpy().reshape(shape), high.numpy().reshape(shape)


def units_of(values: Array, weights: Array) -> tuple[Units, Array]:
    """Return the units of weighted targets (rows, values), and the deviation of each value in these units, (values,).

    That of a constant value is exactly 0, whatever rounding makes of its mean.
    """
    mean = np.average(values, axis=0, weights=weights)
    deviations = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    constant = (values == values[0]).all(0) | (deviations == 0)  # squares of tiny deviations are 0, too
    mean[constant], deviations[constant] = values[0, constant], 0.0
    common = 1.0 if constant.all() else float(np.sqrt((deviations[~constant] ** 2).mean()))
    return Units(tuple(mean.tolist()), common), deviations / common
