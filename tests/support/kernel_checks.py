"""Compare each Triton kernel with PyTorch: by Triton's interpreter on a CPU, or compiled on a GPU."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda import batch_drawing as batch
from structured_ensembles.cuda import batch_norm as norm
from structured_ensembles.cuda.convolution import input_gradient, outputs_of, weight_gradient
from structured_ensembles.data.feeds import TableFeed
from structured_ensembles.data.splits import TensorSplit

here = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="needs Triton's interpreter, which is for machines without a GPU",
)


def check_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    own, other = (nn.BatchNorm2d(shape[1]).to(device) for _ in range(2))
    with torch.no_grad():
        own.weight.uniform_(0.5, 2)
        own.bias.normal_()
        other.load_state_dict(own.state_dict())
    x = (100 + torch.randn(shape, device=device)).to(dtype, memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn_like(x)
    ours, theirs = norm.batch_norm(x, own), other(x)
    close = {"rtol": 1e-3, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(ours, theirs, **close)
    torch.testing.assert_close(own.running_mean, other.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.running_var, other.running_var, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(ours, [x, own.weight, own.bias], dy)
    expected = torch.autograd.grad(theirs, [x, other.weight, other.bias], dy)
    for one, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-2, atol=1e-5 + 1e-2 * float(reference.abs().max()))


def check_channels_of_zeros(size: int, device: str) -> None:
    torch.manual_seed(0)
    own, other = nn.BatchNorm2d(13).to(device), nn.BatchNorm2d(13).to(device)
    beyond = []  # what lies behind the layer's tensors is not theirs
    for tensor in (own.weight, own.bias, own.running_mean, own.running_var):
        assert tensor is not None
        longer = torch.full((16,), torch.nan, device=device)
        tensor.data = longer[:13].copy_(tensor.detach())
        beyond.append(longer[13:])
    x = torch.randn(64, 16, size, size, device=device).to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    x[:, 13:] = dy[:, 13:] = 0
    found = norm.batch_norm(x.requires_grad_(), own)
    expected = other(x[:, :13])
    torch.testing.assert_close(found[:, :13], expected, rtol=1e-4, atol=1e-4)
    dx = torch.autograd.grad(found, x, dy)[0]
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dy[:, :13])[0], rtol=1e-3, atol=1e-4)
    assert found[:, 13:].count_nonzero() == dx[:, 13:].count_nonzero() == 0
    torch.testing.assert_close(own.running_var, other.running_var, rtol=1e-4, atol=1e-4)
    assert all(bool(tensor.isnan().all()) for tensor in beyond)


def check_convolution(
    shape: tuple[int, ...], outputs: int, size: int, stride: int, padding: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(outputs, shape[1], size, size, device=device).to(dtype, memory_format=torch.channels_last)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    y = F.conv2d(*exact, None, stride, padding)
    dy = torch.randn_like(y).to(dtype, memory_format=torch.channels_last)
    expected = [y, *torch.autograd.grad(y, exact, dy.double())]
    how = (weight, stride, padding)
    found = [outputs_of(x, *how), input_gradient(x, dy, *how), weight_gradient(x, dy, *how)]
    for one, reference in zip(found, expected, strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.double(), reference, rtol=1e-2, atol=1e-2 * float(reference.abs().max()))


def check_drawn_batch(
    augmentation: str, shape: tuple[int, int, int], device: str, normalization: str = "standard"
) -> None:
    """Compare the kernel with the feed's own twenty operations, for a whole and for the last, smaller batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.arange(50) % 7
    data = se.Data.from_arrays(images, labels, classes=7, validation=0.2, normalization=normalization).to(device)
    assert isinstance(data.train, TensorSplit)
    feed = TableFeed(data.train, data, 16, augmentation, torch.float32)  # type: ignore[arg-type]
    feed.shuffle(5, 6)
    for step, size in enumerate(feed.batches):
        feed.step.fill_(step)
        inputs, drawn_labels = batch.drawn_batch(feed, size)
        expected, expected_labels = feed.batch(size)
        torch.testing.assert_close(inputs, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(drawn_labels, expected_labels)
    assert [step, size] == [2, 10]
