"""Our Triton kernels give what PyTorch gives: here by Triton's interpreter, in test_cuda.py on a GPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import batch_norm as norm
from structured_ensembles.cuda import convolution
from structured_ensembles.cuda.capture import CaptureError, Step
from structured_ensembles.training import fleet
from structured_ensembles.training import graph_engine as graph
from tests.support.kernel_checks import (
    check_batch_norm,
    check_channels_of_zeros,
    check_convolution,
    check_drawn_batch,
    here,
)

BFLOAT16 = se.Execution(precision="bfloat16")


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
    recipe = se.Recipe(epochs=1, batch_size=16, rate=1e-3, warmup=0, augmentation="none")
    losses = []
    for replaceable in (norm.replaceable, lambda network: []):
        monkeypatch.setattr(graph, "replaceable", replaceable)
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), activation(), nn.Conv2d(5, 16, 3, bias=False)]
        head = [nn.BatchNorm2d(16), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
        history = se.train(
            se.Ensemble([nn.Sequential(*layers, *head)]), data, recipe, "cpu", execution=BFLOAT16, quiet=True
        )
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
    recipe = se.Recipe(epochs=1, batch_size=48, rate=1e-3, warmup=0, augmentation="none")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 10)]
    return se.train(se.Ensemble([nn.Sequential(*layers)]), data, recipe, "cpu", execution=BFLOAT16, quiet=True)


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


@here
@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
def test_a_batch_drawn_in_one_kernel_is_the_one_drawn_in_many(augmentation: str) -> None:
    check_drawn_batch(augmentation, (3, 9, 12), "cpu")
    for normalization in ("none", "unit", "imagenet"):
        check_drawn_batch(augmentation, (3, 9, 12), "cpu", normalization)
