"""Data sets: tensors with a training, a validation and a test split."""

from structured_ensembles.data.dataset import Data
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.sources import load_data
from structured_ensembles.data.splits import Split

__all__ = ["Data", "Normalization", "Split", "load_data"]
