"""An ensemble's outputs and the targets of a split, gathered in one pass."""

from collections.abc import Callable

from torch import Tensor

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs
from structured_ensembles.data import Split
from structured_ensembles.data.preparation import as_floats
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.prediction.held_out import check_labels, gather_outputs

# Inputs (batch, …) as floats on the ensemble's device, targets, the index of the first sample → changed inputs.
Change = Callable[[Tensor, Tensor, int], Tensor]


def gather_predictions(
    ensemble: Ensemble, split: Split, batch_size: int = 512, change: Change | None = None
) -> tuple[Tensor, Tensor]:
    """Gather logits (members, samples, classes) and targets (samples, …), in the same order, on the CPU.

    change: applied to the inputs first, such as an attack. Raises a ValueError for labels without an output.
    """
    device = device_of(ensemble)

    def logits(inputs: Inputs, targets: Tensor, first: int) -> Tensor:
        if change is not None:
            assert isinstance(inputs, Tensor), "only images are changed"
            inputs = change(as_floats(inputs.to(device)), targets.to(device), first)
        return ensemble.logits(inputs, batch_size)

    outputs, labels = gather_outputs(logits, split, batch_size)
    check_labels(outputs, labels)
    return outputs, labels


def gather_foreign_logits(ensemble: Ensemble, split: Split, batch_size: int = 512) -> Tensor:
    """Gather logits (members, samples, classes) for samples of other data, whose labels may be of other classes."""
    return gather_outputs(lambda inputs, *_: ensemble.logits(inputs, batch_size), split, batch_size)[0]
