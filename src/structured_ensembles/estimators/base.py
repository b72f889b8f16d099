"""StructuredEnsemble: parameters, training and calibration that the classifier and the regressor share."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from structured_ensembles.build import structured_ensemble
from structured_ensembles.calibration import Calibration
from structured_ensembles.common.checks import (
    check_flags,
    check_number,
    check_share,
    check_type,
    check_whole,
)
from structured_ensembles.common.devices import Device, device_of
from structured_ensembles.common.inputs import call
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.splits import hold_out
from structured_ensembles.data.weighted import attach_weights, repeat_whole
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import copy_for_trial, dtype_of
from structured_ensembles.prediction.calibration_fit import fit_all
from structured_ensembles.selection import Selection
from structured_ensembles.training import History, Recipe
from structured_ensembles.zoo import mlp

Factory = Callable[[int, int], nn.Module]  # of the number of features and of outputs
Array = NDArray[Any]
NARROWEST, WIDEST = 64, 256  # hidden layers of the default network
BATCH, STEPS = 200, 8  # samples of a default batch at most; it is smaller where an epoch would have fewer steps


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
    ensemble_: Ensemble
    history_: History
    n_iter_: int
    _held_out: tuple[Tensor, Tensor] | None  # outputs (members, samples, …) and targets

    def _draw_seed(self) -> int:
        """Return the seed of everything that is drawn in a fit."""
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _make_model(self, features: int, outputs: int, seed: int) -> nn.Module:
        """Return the network to cut: the user's, that of a factory, or an MLP sized from the data."""
        hint = "give a network, or a function of (n_features, n_outputs) that makes one"
        if self.model is not None and not callable(self.model):  # networks are callable, too
            check_type("model", self.model, nn.Module, hint)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if self.model is None:
                width = 2 ** math.ceil(math.log2(2 * (features + outputs)))
                return mlp(features, outputs, hidden=[min(max(width, NARROWEST), WIDEST)] * 2)
            model = self.model if isinstance(self.model, nn.Module) else self.model(features, outputs)
        check_type("model", model, nn.Module, hint)
        trial = copy_for_trial(model).eval()
        try:
            with torch.no_grad():
                example = torch.zeros(2, features, dtype=dtype_of(trial), device=device_of(trial))
                shape = tuple(call(trial, example).shape)
        except RuntimeError as error:
            raise ValueError(f"model cannot take samples of {counted(features, 'feature')}: {error}") from error
        if shape != (2, outputs):
            raise ValueError(
                f"model must give {counted(outputs, 'number')} for each sample, (batch, {outputs}), but gives {shape} "
                "for a batch of 2"
            )
        return model

    def _train(
        self, model: nn.Module, inputs: Array, targets: Array, weights: Array, strata: Array, loss: Loss, seed: int
    ) -> tuple[Ensemble, Array]:
        """Train an ensemble on distinct rows; return it, not calibrated yet, and the numbers of the rows held out.

        inputs: (rows, features). targets: labels or standardised values, (rows,) or (rows, values). weights: (rows,).
        strata: (rows,); of each stratum the same share is held out.
        """
        check_share("validation_fraction", self.validation_fraction)
        check_whole("epochs", self.epochs)
        check_number("learning_rate", self.learning_rate)
        check_flags(early_stopping=self.early_stopping)
        check_whole("verbose", self.verbose, least=0)  # scikit-learn's own estimators take numbers, too
        if self.batch_size != "auto" and (not isinstance(self.batch_size, Integral) or self.batch_size < 1):
            raise ValueError(f"batch_size must be 'auto' or a whole number of at least 1, not {self.batch_size!r}")
        kept, held_out = (
            rows.numpy() for rows in hold_out(torch.from_numpy(strata), float(self.validation_fraction), seed)
        )
        data = Data.from_arrays(
            inputs[kept],
            attach_weights(targets[kept], weights[kept]),
            validation=(inputs[held_out], attach_weights(targets[held_out], weights[held_out])) if len(held_out) else 0,
            task="regression",  # of values and a weight; the loss knows what they mean
            normalization=standardize_columns(inputs[kept], weights[kept]),
        )
        recipe = self._make_recipe(len(kept), stopping=self.early_stopping and len(held_out) > 0)
        ensemble = structured_ensemble(
            model,
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
        assert ensemble.history is not None
        self.history_, self.n_iter_ = ensemble.history, ensemble.history.epochs
        # In float32 the last digits of a prediction depend on how many samples are predicted together.
        return ensemble if device_of(ensemble).type == "mps" else ensemble.double(), held_out

    def _make_recipe(self, rows: int, stopping: bool) -> Recipe:
        """Return the recipe for so many training rows. stopping: whether samples that are held out end it early."""
        return Recipe(
            epochs=self.epochs,
            batch_size=max(16, min(BATCH, rows // STEPS)) if self.batch_size == "auto" else self.batch_size,
            optimizer="adamw",
            rate=self.learning_rate,
            patience=self.patience if stopping else None,
            keep="best" if stopping else "last",
        )

    def _calibrate(self, inputs: Array, targets: Array, weights: Array) -> None:
        """Calibrate the ensemble on samples that were held out, if any, and keep its outputs on them.

        targets: labels, or values in their units. weights: (rows,); a row of weight 3 counts as three samples.
        """
        self.ensemble_.calibration, self._held_out = Calibration(), None
        rows = repeat_whole(weights)
        if len(rows):
            outputs, wanted = self.ensemble_.logits(inputs[rows]), torch.from_numpy(targets[rows])
            self.ensemble_.calibration = fit_all(Calibration(), outputs, wanted, self.ensemble_.task, gaussian=False)
            self._held_out = outputs, wanted

    def _require_held_out(self, method: str) -> tuple[Tensor, Tensor]:
        """Return outputs (members, samples, …) and targets of the samples held out; raise an error without any."""
        if self._held_out is None:
            raise ValueError(
                f"{method} needs samples that were held out, but there are none: fit with a larger "
                f"validation_fraction than {self.validation_fraction}, or with more samples"
            )
        return self._held_out

    def _check_inputs(self, X: Any) -> Array:
        """Check inputs to predict from, and return them as float32."""
        check_is_fitted(self)
        checked: Array = validate_data(self, X, dtype=np.float32, reset=False)
        return checked

    def _weights(self, sample_weight: Any, X: Array) -> Array:
        """Return checked weights (samples,), ones by default."""
        weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weights < 0).any() or not (weights > 0).any():
            problem = "some are negative" if (weights < 0).any() else "all are zero"
            raise ValueError(f"sample_weight must be at least 0 for all samples and above it for some, but {problem}")
        return weights

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle writes: networks on the CPU, so that any machine can read them."""
        state: dict[str, Any] = super().__getstate__()
        if "ensemble_" in state and device_of(state["ensemble_"]).type != "cpu":
            state = {**state, "ensemble_": deepcopy(state["ensemble_"]).cpu()}
        return state


def standardize_columns(inputs: Array, weights: Array) -> Normalization:
    """Return the mean and deviation of each column of weighted inputs (rows, features); a constant one's is 1."""
    values = inputs.astype(np.float64)
    first = values[0]  # of a constant column, the mean of what is left is exactly zero
    mean = np.average(values - first, axis=0, weights=weights) + first
    deviation = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    deviation[(values == first).all(0) | (deviation < np.finfo(np.float32).tiny)] = 1
    return Normalization(tuple(mean.tolist()), tuple(deviation.tolist()))
