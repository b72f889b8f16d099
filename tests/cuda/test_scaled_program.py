"""Programs with scaled outputs are checked against the network before they are used."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.cuda.scaled_program import compile_and_check
from tests.support.programs import Model, conv, images, norm


def test_weights_that_are_used_beside_their_layer_are_found_out() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.a(x) + F.linear(x, self.a.weight)  # hooks scale the first only

    model = Model(forward, a=nn.Linear(4, 5)).requires_grad_(requires_grad=False)
    with pytest.raises(ProgramError, match="computes another 'output' than the network"):
        compile_and_check(model, {"a": -1}, torch.randn(2, 4), {"a": torch.randn(3, 5)})


def test_networks_that_draw_on_the_host_are_refused() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.a(x) * (1 + 0 * torch.rand(1).item())

    model = Model(forward, a=nn.Linear(4, 5)).requires_grad_(requires_grad=False)
    x, factors = torch.randn(2, 4), {"a": torch.randn(3, 5)}
    before = torch.get_rng_state()
    with pytest.raises(ProgramError):
        compile_and_check(model, {"a": -1}, x, factors)
    assert torch.equal(before, torch.get_rng_state())


def test_a_pass_updates_statistics_and_counters_and_returns_the_type_of_the_factors() -> None:
    model = nn.Sequential(conv(), norm(), nn.Flatten(), nn.Linear(144, 3)).requires_grad_(requires_grad=False)
    factors = {"0": torch.randn(3, 4, requires_grad=True)}
    program = compile_and_check(model, {"0": -3}, images(), factors)
    assert program.program.factors
    before = model[1].running_mean.clone()
    output = program(images(6), factors)
    assert output.dtype == torch.float32
    assert output.shape == (6, 3)
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, before)  # until the epoch ends
    program.store_statistics()
    assert not torch.equal(model[1].running_mean, before)
    (gradient,) = torch.autograd.grad(output.sum(), [factors["0"]])
    assert gradient.shape == (3, 4)
    assert gradient.dtype == torch.float32


def test_compiling_kernels_leaves_statistics_and_counters_as_they_are() -> None:
    model = nn.Sequential(conv(), norm(), nn.Flatten(), nn.Linear(144, 3)).requires_grad_(requires_grad=False)
    factors = {"0": torch.randn(3, 4, requires_grad=True)}
    program = compile_and_check(model, {"0": -3}, images(), factors)
    before = [tensor.clone() for tensor in (*program.tensors(), *model.buffers())]
    program.compile_kernels(images(6), factors)
    assert all(map(torch.equal, (*program.tensors(), *model.buffers()), before))
    assert factors["0"].grad is None


def dropping(rate: float = 0.5) -> nn.Sequential:
    layers = (conv(), nn.ReLU(), nn.Flatten(), nn.Linear(144, 200), nn.Dropout(rate), nn.Linear(200, 3))
    return nn.Sequential(*layers).requires_grad_(requires_grad=False)


def test_dropout_is_that_of_the_network_with_the_same_random_state() -> None:
    model, factors = dropping(), {"3": torch.ones(2, 200, requires_grad=True)}
    nn.init.ones_(model[5].weight)  # random ones may sum to zero in bfloat16: a gradient that looks like dropout's
    program = compile_and_check(model, {"3": -1}, images(), factors)
    x, kept = images(2), []  # one sample of each member
    handle = model[5].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0] != 0))
    torch.manual_seed(5)
    model.train()(x)
    handle.remove()
    for seed, same in ((5, True), (6, False)):
        torch.manual_seed(seed)
        (gradient,) = torch.autograd.grad(program(x, factors).sum(), [factors["3"]])
        assert torch.equal(gradient != 0, kept[0]) is same


def test_compiling_with_dropout_draws_nothing() -> None:
    model, factors = dropping(), {"3": torch.randn(3, 200)}
    before = torch.get_rng_state()
    program = compile_and_check(model, {"3": -1}, images(), factors)
    program.compile_kernels(images(6), factors)
    assert torch.equal(before, torch.get_rng_state())


def test_mean_of_passes_with_dropout_is_near_the_pass_without() -> None:
    model = dropping(0.3)
    factors = {"3": torch.rand(2, 200) + 0.5}
    program = compile_and_check(model, {"3": -1}, images(), factors)
    x = images(4)
    torch.manual_seed(0)
    mean = torch.stack([program(x, factors) for _ in range(400)]).mean(0)
    with program.autocast():
        _, without = program.start([x], [factors["3"]], drop=False)
    torch.testing.assert_close(mean, without.float(), rtol=0.1, atol=0.05)


def test_networks_that_draw_numbers_they_do_not_use_are_refused() -> None:
    """A graph would draw none. The trial leaves the random state as it was."""

    def forward(self: Model, x: Tensor) -> Tensor:
        random.random()
        return self.a(x)

    model = Model(forward, a=nn.Linear(4, 5)).requires_grad_(requires_grad=False)
    before = random.getstate()
    with pytest.raises(ProgramError, match="on the host"):
        compile_and_check(model, {"a": -1}, torch.randn(2, 4), {"a": torch.randn(3, 5)})
    assert random.getstate() == before


def test_a_network_with_another_dropout_at_every_pass_is_refused() -> None:
    rates = iter([0.1, 0.2, 0.3, 0.4])
    model = Model(lambda self, x: F.dropout(self.a(x), next(rates)), a=nn.Linear(4, 5)).requires_grad_(False)
    with pytest.raises(ProgramError, match="drops out at rates"):
        compile_and_check(model, {"a": -1}, torch.randn(2, 4), {"a": torch.randn(3, 5)})
