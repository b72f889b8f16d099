"""The file of an ensemble: weights, and the JSON that rebuilds the structure; docs/format.md describes it."""

from structured_ensembles.artifact.contents import VERSION, Contents
from structured_ensembles.artifact.file import FORMAT, load, save

__all__ = ["FORMAT", "VERSION", "Contents", "load", "save"]
