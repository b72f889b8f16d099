"""Our Triton kernels give what PyTorch gives: here by Triton's interpreter, in test_cuda.py on a GPU."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import batch_drawing as batch
from structured_ensembles.cuda import batch_norm as norm
from structured_ensembles.cuda import convolution
from structured_ensembles.cuda.capture import CaptureError, Step
from structured_ensembles.cuda.convolution import input_gradient, outputs_of, weight_gradient
from structured_ensembles.data.feeds import TableFeed
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.training import fleet
from structured_ensembles.training import graph_engine as graph

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


@here
@pytest.mark.parametrize("shape", [(8, 8, 16, 16), (3, 7, 5, 5), (16, 70, 4, 4), (9, 3, 33, 31), (2, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_batch_norm(shape, dtype, "cpu")


@here
def test_batch_norm_of_more_rows_than_one_turn_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "MOST_BLOCKS", 4)
    shape = norm._Shape(torch.empty(9, 64, 8, 8))
    assert shape.per_block > shape.tile["HIGH"]
    check_batch_norm((9, 64, 8, 8), torch.float32, "cpu")


@here
def test_batch_norm_leaves_channels_of_zeros() -> None:
    check_channels_of_zeros(5, "cpu")


@here
@pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((8, 16, 12, 12), 8, 3, 1, 1),
        ((5, 3, 11, 7), 16, 3, 2, 1),
        ((4, 7, 9, 9), 5, 5, 1, 0),
        ((2, 8, 6, 6), 16, 1, 2, 0),
        ((2, 24, 6, 9), 40, 3, 1, 1),
        ((2, 64, 5, 4), 32, 3, 1, 1),
        ((3, 1, 9, 9), 20, 7, 1, 3),
        ((2, 5, 6, 6), 3, 2, 1, 0),
        ((2, 16, 4, 4), 8, 1, 1, 1),  # more padding than kernel
    ],
)
def test_convolution(shape: tuple[int, ...], outputs: int, size: int, stride: int, padding: int) -> None:
    # In float16, as the interpreter multiplies no matrices of bfloat16.
    check_convolution(shape, outputs, size, stride, padding, torch.float16, "cpu")


def test_convolution_of_a_part_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the channels, every second pixel: stored channels last, but with gaps, of which kernels do not know."""
    given: list[Tensor] = []

    class Watched:
        @staticmethod
        def apply(x: Tensor, *_: object) -> Tensor:
            given.append(x)
            return x

    monkeypatch.setattr(convolution, "_Convolution", Watched)
    whole = torch.randn(2, 16, 6, 6).to(torch.bfloat16, memory_format=torch.channels_last)
    for x in (whole, whole.chunk(2, 1)[1], whole[:, :, ::2, ::2], whole[:, :, 1:, :-1], whole.contiguous()):
        convolution.convolution(x, nn.Conv2d(x.shape[1], 8, 3))
        assert given[-1].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(given[-1], x)
    assert given[0] is whole


@here
def test_convolution_of_more_pixels_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MOST_BLOCKS", 4)
    check_convolution((6, 2, 16, 16), 4, 3, 1, 1, torch.float16, "cpu")


@pytest.fixture
def normalized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the graph engine's steps run here, on our batch normalisation; lists the channels it has seen."""
    channels: list[int] = []

    def ours(x: Tensor, module: nn.BatchNorm2d, *more: Any, **named: Any) -> Tensor:
        channels.append(x.shape[1])
        return batch_norm(x, module, *more, **named)

    def fits(x: Tensor) -> bool:
        return x.is_contiguous(memory_format=torch.channels_last) and x.dtype == torch.bfloat16

    batch_norm = norm.batch_norm
    monkeypatch.setattr(norm, "batch_norm", ours)
    monkeypatch.setattr(norm, "fits", fits)
    monkeypatch.setattr(fleet, "_captured", lambda recipe, device, mesh: True)
    return channels


class Peering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError("something else than a tensor")
        return x.clamp(min=0)


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * (ctx.saved_tensors[0] > 0)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rectified.apply(x)  # type: ignore[no-any-return]


@here
@pytest.mark.parametrize(
    ("activation", "seen", "fused"),
    [
        (nn.ReLU, [8, 16] * 3, True),  # three steps; it becomes a part of the normalisation
        (Peering, [5, 16] * 3, False),  # an error at once
        (Own, [8, 16] * 4, False),  # on the way back
    ],
)
def test_a_network_learns_the_same_by_our_batch_norm(
    activation: type[nn.Module], seen: list[int], fused: bool, normalized: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with five channels filled up to eight where that can be found out."""
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = se.Data.from_arrays(images, torch.arange(48) % 10, validation=0.0)
    recipe = se.Recipe(epochs=1, batch_size=16, rate=1e-3, warmup=0, precision="bfloat16", augmentation="none")
    losses = []
    for replaceable in (norm.replaceable, lambda network: []):
        monkeypatch.setattr(graph, "replaceable", replaceable)
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), activation(), nn.Conv2d(5, 16, 3, bias=False)]
        head = [nn.BatchNorm2d(16), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        history = se.train(se.Ensemble([nn.Sequential(*layers, *head)]), data, recipe, "cpu", quiet=True)
        losses.append(history.rows[0]["loss"])
        if replaceable is norm.replaceable:
            assert any("ReLUs are not fused" in message for message in history.fallbacks) != fused
    assert normalized == seen
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.fixture
def warmed_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps run once before they are taken, as on a GPU; lists how many there were."""
    numbers: list[int] = []

    def captured(steps: Sequence[Step], *_: object, **__: object) -> list[Step]:
        numbers.append(len(steps))
        try:
            for step in steps:
                step()
        except Exception as error:
            raise CaptureError(str(error)) from error
        return list(steps)

    monkeypatch.setattr(graph, "all_captured", captured)
    return numbers


def trained() -> se.History:
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = se.Data.from_arrays(images, torch.arange(48) % 10, validation=0.0)
    recipe = se.Recipe(epochs=1, batch_size=48, rate=1e-3, warmup=0, precision="bfloat16", augmentation="none")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 10)]
    return se.train(se.Ensemble([nn.Sequential(*layers)]), data, recipe, "cpu", quiet=True)


@here
@pytest.mark.usefixtures("normalized")
def test_where_our_kernels_do_not_run_pytorchs_do(warmed_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(graph, "replaceable", norm.replaceable)
    monkeypatch.setattr(norm, "batch_norm", broken)
    found = trained()
    assert found.fallbacks == ["training goes on without our own kernels, slower: Failed to find C compiler."]
    assert warmed_up == [1, 1]
    monkeypatch.setattr(graph, "replaceable", lambda network: [])
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in trained().rows]


@here
@pytest.mark.usefixtures("normalized")
def test_what_no_kernel_is_to_blame_for_trains_in_the_loop(
    warmed_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("it waits for the device")

    monkeypatch.setattr(graph, "replaceable", norm.replaceable)
    monkeypatch.setattr(graph, "side_by_side", broken)
    history = trained()
    assert history.fallbacks == ["training goes on without a CUDA graph, slower: it waits for the device"]
    assert history.engine == "loop"
    assert warmed_up == [1, 1]


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


@here
@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
def test_a_batch_drawn_in_one_kernel_is_the_one_drawn_in_many(augmentation: str) -> None:
    check_drawn_batch(augmentation, (3, 9, 12), "cpu")
    for normalization in ("none", "unit", "imagenet"):
        check_drawn_batch(augmentation, (3, 9, 12), "cpu", normalization)
