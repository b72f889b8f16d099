"""Ensembles cut out of one network: the public names.

import structured_ensembles as se

model = se.zoo.resnet20(num_classes=10, in_channels=1)
data = se.load_data("digits")
graph = se.trace(model, data.example())
scales = se.learn_scales(model, graph, data, members=5)
scores = se.saliency(model, graph, scales, data)
subnets = se.select(graph, scores, prune=0.5)
networks = [se.extract(model, graph, subnet) for subnet in subnets]
"""

from typing import TYPE_CHECKING, Any

from structured_ensembles import continual, evaluation, methods, zoo
from structured_ensembles.build import structured_ensemble
from structured_ensembles.channels import ChannelGraph, ChannelGroup, trace
from structured_ensembles.checking.model_check import ModelCheck, check_model
from structured_ensembles.common.gaussian import Gaussians, gaussian_nll
from structured_ensembles.common.version import VERSION
from structured_ensembles.data import Data, Normalization, load_corrupted, load_data
from structured_ensembles.diversity import mmd2
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import evaluate
from structured_ensembles.export import export_onnx, export_pt2, quantize_onnx
from structured_ensembles.extraction import extract
from structured_ensembles.networks.heads import with_head
from structured_ensembles.prediction.combination import Uncertainty
from structured_ensembles.runs.grid import Job, Outcome, run_grid
from structured_ensembles.saliency import Scores, saliency
from structured_ensembles.scaling import Scales
from structured_ensembles.search import learn_scales
from structured_ensembles.selection import Subnet, select
from structured_ensembles.storage.container import ArtifactError
from structured_ensembles.train import train
from structured_ensembles.training import EpochRow, Execution, History, ParameterRule, Recipe, Teacher
from structured_ensembles.training.mesh import join_processes
from structured_ensembles.training.recalibration import recalibrate_statistics
from structured_ensembles.zoo.by_name import from_factory

if TYPE_CHECKING:
    from structured_ensembles.estimators import StructuredEnsembleClassifier, StructuredEnsembleRegressor

__version__ = VERSION

__all__ = [
    "ArtifactError",
    "ChannelGraph",
    "ChannelGroup",
    "Data",
    "Ensemble",
    "EpochRow",
    "Execution",
    "Gaussians",
    "History",
    "Job",
    "ModelCheck",
    "Normalization",
    "Outcome",
    "ParameterRule",
    "Recipe",
    "Scales",
    "Scores",
    "StructuredEnsembleClassifier",
    "StructuredEnsembleRegressor",
    "Subnet",
    "Teacher",
    "Uncertainty",
    "check_model",
    "continual",
    "evaluate",
    "evaluation",
    "export_onnx",
    "export_pt2",
    "extract",
    "from_factory",
    "gaussian_nll",
    "join_processes",
    "learn_scales",
    "load_corrupted",
    "load_data",
    "methods",
    "mmd2",
    "quantize_onnx",
    "recalibrate_statistics",
    "run_grid",
    "saliency",
    "select",
    "structured_ensemble",
    "trace",
    "train",
    "with_head",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Import the estimators at their first use, since scikit-learn takes most of a second to import."""
    if name not in ("StructuredEnsembleClassifier", "StructuredEnsembleRegressor"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from structured_ensembles import estimators

    return getattr(estimators, name)
