"""Adversarial attacks: small changes of the images that raise the loss the most."""

from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.modes import evaluation_mode


def fgsm(ensemble: Ensemble, images: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Attack images by the fast gradient sign method: move every pixel by `epsilon` so that the loss grows.

    images: (batch, …) with pixels in [0,1], as the result's are. targets: (batch,). epsilon: in units of a pixel in
    [0,1]. The loss is the cross-entropy of the members' mean logits, in evaluation mode. The ensemble's own gradients
    stay as they are.
    """
    check_epsilon(epsilon)
    if not images.is_floating_point() or (len(images) and not (images.min() >= 0 and images.max() <= 1)):
        raise ValueError(
            f"images must be floats with pixels in [0,1], "
            f"not {images.dtype} with other values: divide by 255 or undo the normalisation first"
        )
    with gradients_on(), evaluation_mode(ensemble):
        pixels = images.detach().clone().requires_grad_()
        # A sum, so that a sample's gradient does not depend on the batch size.
        # A copy of the targets, which may have been made under inference mode.
        loss = F.cross_entropy(ensemble(pixels).mean(0), targets.clone(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, pixels)
    return (images + epsilon * gradient.sign()).clamp(0, 1)


def check_epsilon(epsilon: float, argument: str = "epsilon") -> None:
    """Raise a ValueError unless `epsilon` is a number between 0 and 1."""
    if not isinstance(epsilon, Real) or not 0 <= float(epsilon) <= 1:
        raise ValueError(f"{argument} must be between 0 and 1, the range of a pixel, not {epsilon!r}")
