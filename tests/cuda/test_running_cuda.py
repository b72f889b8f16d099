"""Programs on our compiled kernels, in bfloat16, compute what the networks do."""

from collections.abc import Mapping
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.compilation import compile_networks
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, unpadded
from structured_ensembles.networks.copying import clone_model
from tests.support.kernel_checks import recorded_launches
from tests.support.networks import pruned
from tests.support.programs import output_gradient, results_of_network

pytestmark = pytest.mark.cuda


def gradient_errors_of_autocast(network: nn.Module, x: Tensor, reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return by parameter the relative error of the gradients that PyTorch itself computes in bfloat16.

    It is large: a ResNet20's gradients are off by a fifth on average, whoever computes them.
    """
    copied = clone_model(network).train()
    with torch.autocast("cuda", torch.bfloat16):
        output = copied(x)
    output.backward(output_gradient(output.detach().cpu()).cuda())
    errors = {}
    for name, parameter in copied.named_parameters():
        wanted = reference[f"{name}.grad"]
        assert parameter.grad is not None
        errors[name] = float((parameter.grad.double().cpu() - wanted).norm() / wanted.norm())
    return errors


@pytest.mark.parametrize("prune", [0.0, 0.5, 0.8])
def test_members_in_bfloat16_are_near_their_networks_in_float64(prune: float) -> None:
    networks: list[nn.Module] = []
    for seed in range(3):
        torch.manual_seed(seed)
        networks.append(se.zoo.resnet20().cuda() if prune == 0 else pruned(prune).cuda())
    example = torch.randn(3 * 32, 3, 16, 16, device="cuda")
    told: list[str] = []
    (one,) = compile_networks(networks, example[:2], bfloat16=True, together=True, tell=told.append)
    assert told == []
    expected = [
        results_of_network(network.cpu(), batch.cpu(), one.program.counters)
        for network, batch in zip(networks, example.chunk(3), strict=True)
    ]
    stack = Stack(one.program, [network.cuda() for network in networks], one.shapes, one.bfloat16)
    run = Run(one.program, stack.weights, stack.learned, None)
    with recorded_launches() as names, torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        outputs = run.forward([example])
        gradient = torch.cat([output_gradient(output.cpu()) for output in outputs.chunk(3)]).cuda()
        gradients = run.backward(gradient)
    assert names.count("normalize") == 19
    assert "moments" not in names  # convolutions have left them
    assert not run.tape.records
    assert not run.norms
    for number, (reference, network) in enumerate(zip(expected, networks, strict=True)):
        actual = outputs.chunk(3)[number].double().cpu()
        assert float((actual - reference["output"]).norm() / reference["output"].norm()) < 0.05
        errors, autocast_errors = {}, gradient_errors_of_autocast(network, example.chunk(3)[number], reference)
        for placeholder, stacked in gradients.items():
            name = one.program.names[placeholder]
            wanted = reference[f"{name}.grad"]
            ours = unpadded(stacked[number], wanted.shape).double().cpu()
            errors[name] = float((ours - wanted).norm() / wanted.norm())
        assert errors.keys() == autocast_errors.keys()
        assert max(errors.values()) < 1  # a gradient of zeros has 1, that of another layer √2
        assert fmean(errors.values()) < 1.1 * fmean(autocast_errors.values())
        for placeholder, name in one.program.names.items():
            if "running" in name:
                ours = unpadded(stack.weights[placeholder][number], reference[name].shape).double().cpu()
                torch.testing.assert_close(ours, reference[name], rtol=2e-2, atol=2e-2)
