"""Argument validation of evaluate(), before any work starts."""

from __future__ import annotations

from collections.abc import Sequence

from structured_ensembles.common.checks import check_list, check_type
from structured_ensembles.common.inputs import is_several
from structured_ensembles.data import Data
from structured_ensembles.data.corrupted import CorruptedData, CorruptedInfo
from structured_ensembles.data.dataset import check_data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.attacks import check_epsilon
from structured_ensembles.evaluation.corruptions import CORRUPTIONS
from structured_ensembles.evaluation.corruptions.corrupt import check_name, check_severity
from structured_ensembles.prediction.combination import Combine


def check_request(
    data: Data,
    fgsm: Sequence[float],
    corruptions: bool | Sequence[str] | CorruptedData,
    severities: Sequence[int],
    ood: Data | None,
) -> Sequence[str]:
    """Check the arguments of evaluate() and return the names of the corruptions to measure."""
    if data.task == "regression" and (fgsm or corruptions or ood is not None):
        raise ValueError("fgsm, corruptions and ood must be left out for a regression, which has no classes")
    if (fgsm or corruptions) and is_several(data.shape):
        raise ValueError("fgsm and corruptions must be left out for data of several inputs: they change single images")
    check_list("severities", severities)
    for epsilon in fgsm:
        check_epsilon(epsilon, "each of fgsm")
    if ood is not None:
        check_data(ood, "ood")
        ood.split("test")
        if ood.shape != data.shape:
            raise ValueError(f"ood must have inputs of shape {data.shape}, as the data have, not {ood.shape}")
    names = _corruption_names(data, corruptions)
    if names:
        for severity in severities:
            check_severity(severity, "each of severities")
    return names


def check_deep(deep: Ensemble, data: Data, combine: Combine) -> None:
    """Raise an error unless `deep` is an ensemble that these data allow a comparison with."""
    check_type("deep", deep, Ensemble, "methods.deep_ensemble trains one")
    if data.task != "classification":
        raise ValueError("deep must be left out for a regression: the comparison is by the NLL of classes")
    if data.validation is None:
        raise ValueError("deep needs data with a validation split, which temperatures are fitted on")
    if combine == "vote":
        raise ValueError("deep needs combine='mean' or 'logits': votes have no temperature")


def check_official(info: CorruptedInfo, data: Data) -> None:
    """Raise a ValueError unless official corrupted images are those of a data set such as `data`."""
    if info.shape != data.shape:
        raise ValueError(f"corruptions have images of shape {info.shape}, but the data of {data.shape}")
    if info.num_classes != data.num_classes:
        raise ValueError(f"corruptions have images of {info.num_classes} classes, but the data of {data.num_classes}")


def _corruption_names(data: Data, corruptions: bool | Sequence[str] | CorruptedData) -> Sequence[str]:
    if not corruptions:
        return ()
    if len(data.shape) != 3:
        raise ValueError(f"corruptions are for images (channels, height, width), not for inputs of shape {data.shape}")
    if isinstance(corruptions, CorruptedData):
        check_official(corruptions.info, data)
        return corruptions.names
    if corruptions is True:
        return [name for name in CORRUPTIONS if name != "saturate" or data.shape[0] == 3]
    check_list("corruptions", corruptions, "names")
    assert not isinstance(corruptions, bool)
    for name in corruptions:
        check_name(name, "each of corruptions")
    return corruptions
