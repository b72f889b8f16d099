"""Data sets: tensors with a training, a validation and a test split."""

from structured_ensembles.data.dataset import Data, Split
from structured_ensembles.data.sources import load_data

__all__ = ["Data", "Split", "load_data"]
