"""recalibrate_statistics(): running statistics equal those of the data, and nothing else changes."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se

X = torch.randn(96, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 2


def some_data() -> se.Data:
    return se.Data.from_arrays(X, torch.arange(96) % 4, validation=0.0, normalization="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(5, 7, 3),
        nn.BatchNorm2d(7, momentum=None, affine=False),
        nn.Flatten(),
        nn.Linear(28, 4),
    )


def test_statistics_equal_a_direct_computation_in_one_batch() -> None:
    model = network()
    se.recalibrate_statistics(model, some_data(), batch_size=96)
    first = model[0](X).detach().double()
    assert torch.allclose(model[1].running_mean.double(), first.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(model[1].running_var.double(), first.var((0, 2, 3)), rtol=1e-4)  # unbiased
    # Dropout is off, and the first norm normalises by the batch: its mean and biased variance.
    mean, variance = first.mean((0, 2, 3), keepdim=True), first.var((0, 2, 3), keepdim=True, correction=0)
    hidden = ((first - mean) / (variance + 1e-5).sqrt() * model[1].weight[:, None, None]).relu()
    second = nn.functional.conv2d(hidden, model[4].weight.double(), model[4].bias.double()).detach()
    assert torch.allclose(model[5].running_mean.double(), second.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(model[5].running_var.double(), second.var((0, 2, 3)), rtol=1e-4)


def test_batches_count_equally_and_have_nearly_equal_sizes() -> None:
    model, seen = network(), []
    handle = model[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().double()))
    assert se.recalibrate_statistics(model, some_data(), batch_size=50) is model
    handle.remove()
    assert [len(batch) for batch in seen] == [48, 48]  # not 50 and 46
    means, variances = (
        torch.stack([f(batch) for batch in seen]).mean(0)
        for f in (lambda batch: batch.mean((0, 2, 3)), lambda batch: batch.var((0, 2, 3)))
    )
    assert torch.allclose(model[1].running_mean.double(), means, atol=1e-5)
    assert torch.allclose(model[1].running_var.double(), variances, rtol=1e-4)
    assert int(model[1].num_batches_tracked) == 2
    few: list[int] = []
    model[1].register_forward_pre_hook(lambda _, inputs: few.append(len(inputs[0])))
    se.recalibrate_statistics(model, some_data(), batch_size=10, batches=3)
    assert few == [10, 10, 10]


@pytest.mark.parametrize("training", [True, False])
def test_everything_else_stays_as_it_was(training: bool) -> None:
    """Batch norms of a network in evaluation mode were in training mode afterwards."""
    model = network().train(training)
    model[4].eval()  # a mode of its own
    model[1].running_mean.fill_(float("nan"))  # of a training that went wrong
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    se.recalibrate_statistics(model, some_data())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (model[1].momentum, model[5].momentum) == (0.1, None)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"{layer}.{name}" for layer in (1, 5) for name in statistics}
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_failed_pass_leaves_the_statistics() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.append(nn.Linear(5, 5))  # does not fit
    with pytest.raises(RuntimeError):
        se.recalibrate_statistics(model, some_data())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model[1].momentum == 0.1


def test_network_without_batch_norm_is_returned_unchanged_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.LayerNorm(4))
    with caplog.at_level(logging.WARNING):
        assert se.recalibrate_statistics(model, some_data()) is model
    assert "no batch norm with running statistics" in caplog.text


def test_pass_over_no_batches_is_an_error() -> None:
    loaders = [DataLoader(TensorDataset(X, torch.arange(96) % 4), batch_size=size) for size in (32, 100)]
    data = se.Data.from_loaders(loaders[0], classes=4, normalization="none")
    object.__setattr__(data.train, "loader", DataLoader(loaders[1].dataset, batch_size=100, drop_last=True))
    model = network()
    with pytest.raises(ValueError, match=r"^a statistics pass over no batches: data must have training samples"):
        se.recalibrate_statistics(model, data)
    with pytest.raises(ValueError, match="batches must be a whole number of at least 1, or None, not 0"):
        se.recalibrate_statistics(model, some_data(), batches=0)
