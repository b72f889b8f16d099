"""Corruptions of images, after Hendrycks and Dietterich (2019), as tensor operations on whole batches."""

from structured_ensembles.evaluation.corruptions.corrupt import CORRUPTIONS, SEVERITIES, corrupt

__all__ = ["CORRUPTIONS", "SEVERITIES", "corrupt"]
