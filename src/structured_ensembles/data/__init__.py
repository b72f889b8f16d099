"""Data sets: tensors with a training, a validation and a test split."""

from structured_ensembles.data.corrupted import CorruptedData, load_corrupted
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.sources import load_data
from structured_ensembles.data.splits import Split

__all__ = ["CorruptedData", "Data", "Normalization", "Split", "load_corrupted", "load_data"]
