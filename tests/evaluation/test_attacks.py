"""Adversarial attacks on ensembles."""

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.evaluation import fgsm


def linear_ensemble(members: int = 3) -> se.Ensemble:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(27, 4)) for _ in range(members)]
    return se.Ensemble(networks, normalization=se.Normalization((0.4, 0.5, 0.6), (0.2, 0.3, 0.1)))


def test_fgsm_of_linear_members_equals_a_hand_computation() -> None:
    ensemble = linear_ensemble()
    images, targets = torch.rand(6, 3, 3, 3), torch.randint(0, 4, (6,))
    weight = torch.stack([member[1].weight for member in ensemble.members]).mean(0).double()
    bias = torch.stack([member[1].bias for member in ensemble.members]).mean(0).double()
    mean, deviation = (
        torch.tensor(values).double().repeat_interleave(9)
        for values in (ensemble.normalization.mean, ensemble.normalization.deviation)
    )
    logits = ((images.flatten(1).double() - mean) / deviation) @ weight.T + bias
    slope = (logits.softmax(-1) - nn.functional.one_hot(targets, 4)) @ weight / deviation
    expected = np.clip(images.flatten(1).double().numpy() + 0.1 * np.sign(slope.detach().numpy()), 0, 1)
    attacked = fgsm(ensemble, images, targets, 0.1)
    np.testing.assert_allclose(attacked.flatten(1).numpy(), expected, atol=1e-6)
    assert not attacked.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(fgsm(ensemble, images, targets.clone(), 0.1), attacked)
    one_by_one = torch.cat([fgsm(ensemble, images[i : i + 1], targets[i : i + 1], 0.1) for i in range(6)])
    torch.testing.assert_close(one_by_one, attacked)


def test_fgsm_stays_within_epsilon_lowers_accuracy_and_leaves_the_ensemble_unchanged() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=1), quiet=True)
    ensemble.train().zero_grad()
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    images, targets = data.test.inputs[:64].float() / 255, data.test.targets[:64]
    for epsilon in (0.0, 0.02, 0.3):
        attacked = fgsm(ensemble, images, targets, epsilon)
        assert float((attacked - images).abs().max()) <= epsilon + 1e-6
        assert attacked.min() >= 0
        assert attacked.max() <= 1
        if epsilon == 0:
            assert torch.equal(attacked, images)
    losses = [
        float(nn.functional.cross_entropy(ensemble.logits(x).mean(0), targets))
        for x in (images, fgsm(ensemble, images, targets, 0.02))
    ]
    assert losses[1] > 1.05 * losses[0]
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in ensemble.state_dict().items()
    )  # also of batch norm
    assert all(module.training for module in ensemble.modules())
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    with torch.no_grad():
        assert torch.equal(fgsm(ensemble, images, targets, 0.3), attacked)


def test_invalid_attack_arguments_are_errors() -> None:
    ensemble, targets = linear_ensemble(), torch.zeros(2, dtype=torch.long)
    for epsilon in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="epsilon must be between 0 and 1"):
            fgsm(ensemble, torch.rand(2, 3, 3, 3), targets, epsilon)
    for images in (torch.zeros(2, 3, 3, 3, dtype=torch.uint8), 2 + torch.rand(2, 3, 3, 3)):
        with pytest.raises(ValueError, match=r"floats with pixels in \[0,1\]"):
            fgsm(ensemble, images, targets, 0.1)
