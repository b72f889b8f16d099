"""StructuredEnsembleClassifier: an ensemble cut out of one network, as a classifier of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import nn

from structured_ensembles.calibration.conformal import Method, fit_sets
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.data.weighted import merge_equal_rows, weighted_cross_entropy
from structured_ensembles.estimators.base import Array, Factory, StructuredEnsemble, standardize_columns
from structured_ensembles.examination.examine import warn_about_probabilities
from structured_ensembles.prediction.combination import Uncertainty, exact_probabilities
from structured_ensembles.prediction.undecided import check_decided
from structured_ensembles.selection import Selection


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
        weights; else it trains for all epochs.
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
        learning_rate: float = 0.01,
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> StructuredEnsembleClassifier:
        """Train on inputs (samples, features) and labels (samples,) of any type; return self."""
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        weights = self._weights(sample_weight, X)
        self.classes_, labels = np.unique(y[weights > 0], return_inverse=True)  # a class without weight is not there
        X, weights = X[weights > 0], weights[weights > 0]
        rows, weights = merge_equal_rows(X, labels.astype(np.float64), weights)
        X, labels = X[rows], labels[rows]
        class_weights, seed = self._class_weights(labels, weights), self._draw_seed()
        model = self._make_model(X.shape[1], len(self.classes_), seed)
        if self.model is not None:
            classes, normalization = len(self.classes_), standardize_columns(X, weights)
            data = Data.from_arrays(X, labels, classes=classes, validation=0, normalization=normalization)
            warn_about_probabilities(model, data)
        self.ensemble_, held_out = self._train(
            model, X, labels, weights * class_weights[labels], labels, weighted_cross_entropy, seed
        )
        self.ensemble_.task, self.ensemble_.target_shape = "classification", ()
        self.ensemble_.classes = tuple(map(str, self.classes_.tolist()))
        self._calibrate(X[held_out], labels[held_out], weights[held_out])
        return self

    def _class_weights(self, labels: Array, weights: Array) -> Array:
        """Return a weight for each class, (classes,). labels, weights: of the samples, (rows,)."""
        if self.class_weight is None:
            return np.ones(len(self.classes_))
        if not isinstance(self.class_weight, Mapping):
            if self.class_weight != "balanced":
                raise ValueError(f"class_weight must be a dict, 'balanced' or None, not {self.class_weight!r}")
            return weights.sum() / (len(self.classes_) * np.bincount(labels, weights))
        classes = self.classes_.tolist()
        unknown = [label for label in self.class_weight if label not in classes]
        if unknown and not set(classes) <= set(self.class_weight):  # a mistyped label, not a class that this y lacks
            raise ValueError(f"class_weight must have labels of y, {classes}, not {unknown}")
        by_class = np.array([self.class_weight.get(label, 1.0) for label in classes], dtype=np.float64)
        if not (np.isfinite(by_class) & (by_class > 0)).all():
            raise ValueError(f"class_weight must have finite weights above 0, not {self.class_weight!r}")
        return by_class

    def predict_proba(self, X: Any) -> Array:
        """Return probabilities (samples, classes), calibrated on the samples held out."""
        inputs = self._check_inputs(X)
        probabilities: Array = self.ensemble_.predict_proba(inputs).numpy()
        return probabilities

    def predict(self, X: Any) -> Array:
        """Return the likeliest label of each sample, (samples,)."""
        probabilities = self.predict_proba(X)
        check_decided(torch.from_numpy(probabilities), "predict")
        labels: Array = self.classes_[probabilities.argmax(1)]
        return labels

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return entropy, mutual information and disagreement of the members, (samples,) each."""
        inputs = self._check_inputs(X)
        return self.ensemble_.uncertainty(inputs)

    def predict_set(self, X: Any, coverage: float = 0.9, method: Method = "aps") -> Array:
        """Return the classes that may be right: booleans (samples, classes).

        coverage: how often the true class is among them, on average over samples and over draws of those held out.
            These also choose the temperature, the epoch of early stopping and that of the search for
            selection="learned", so that it may be slightly less often.
        method: see `ConformalSets`.
        """
        inputs = self._check_inputs(X)
        temperature = self.ensemble_.temperature
        logits, labels = self._require_held_out("predict_set")
        rule = fit_sets(exact_probabilities(logits, temperature), labels, coverage, method)
        probabilities = exact_probabilities(self.ensemble_.logits(inputs), temperature)
        sets: Array = rule.sets(check_decided(probabilities, "predict_set")).numpy()
        return sets
