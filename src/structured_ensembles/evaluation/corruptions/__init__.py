"""Corruptions of images, after Hendrycks and Dietterich (2019), as tensor operations on whole batches."""

from structured_ensembles.evaluation.corruptions.corrupt import (
    CORRUPTIONS,
    EXTRA,
    ORIGIN,
    SEVERITIES,
    STANDARD,
    corrupt,
)

__all__ = ["CORRUPTIONS", "EXTRA", "ORIGIN", "SEVERITIES", "STANDARD", "corrupt"]
