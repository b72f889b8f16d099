"""Which convolutions the kernels take, on which GPUs, and what they are told; without launching one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from structured_ensembles.cuda import convolution, weight_gradient
from structured_ensembles.cuda.convolution import Window
from tests.support.kernel_checks import here

GPU = torch.device("cuda", 0)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors look as if they were on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def images(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return images (samples, channels, height, width), channels last, without memory."""
    samples, channels, height, width = shape
    return torch.empty(samples, height, width, channels, dtype=dtype, device="meta").permute(0, 3, 1, 2)


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return weights (members, outputs, inputs, rows, taps), the inputs innermost, without memory."""
    members, outputs, inputs, rows, taps = shape
    return torch.empty(members, outputs, rows, taps, inputs, dtype=dtype, device="meta").permute(0, 1, 4, 2, 3)


@here
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("x", "weight", "window"),
    [
        (images(8, 3, 9, 9, dtype=torch.float32), weights(2, 4, 3, 3, 3, dtype=torch.float32), Window(1, 1)),
        (images(8, 3, 9, 9), weights(2, 4, 3, 3, 3, dtype=torch.float32), Window(1, 1)),
        (images(8, 3, 9, 9), torch.empty(2, 4, 3, 3, 3, dtype=torch.bfloat16, device="meta"), Window(1, 1)),
        (images(0, 3, 9, 9), weights(2, 4, 3, 3, 3), Window(1, 1)),
        (images(8, 3, 2, 9), weights(2, 4, 3, 3, 3), Window()),
        (images(8, 3, 40, 40), weights(2, 4, 3, 1, 33), Window(1, 16)),
        (images(2**21, 32, 8, 4), weights(2, 4, 32, 3, 3), Window(1, 1)),
    ],
    ids=["float32", "two types", "channels first", "no images", "no outputs", "large window", "many inputs"],
)
def test_layers_without_a_kernel(x: Tensor, weight: Tensor, window: Window) -> None:
    assert not convolution.fits(x, weight, window)
    assert convolution.fits(images(8, 3, 9, 9), weights(2, 4, 3, 3, 3), window)


@here
@pytest.mark.usefixtures("on_gpu")
def test_outputs_of_a_member_are_counted_in_32_bits() -> None:
    """VGG16 at 224 × 224: 668 images have 2³¹ outputs, of only 10⁸ inputs."""
    one, two = weights(1, 64, 3, 3, 3), weights(2, 64, 3, 3, 3)
    assert convolution.fits(images(668, 3, 224, 224), one, Window(1, 1))
    assert not convolution.fits(images(669, 3, 224, 224), one, Window(1, 1))
    assert not convolution.fits(images(668, 3, 224, 224), one, Window(1, 2))
    assert convolution.fits(images(2 * 668, 3, 224, 224), two, Window(1, 1))
    assert not convolution.fits_prediction(images(2 * 668, 3, 224, 224), two, Window(1, 1))  # may share its images


@here
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("inputs", [64, 72])
@pytest.mark.parametrize("outputs", [64, 72])
def test_only_whole_tiles_are_loaded_without_masks(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, stride: int
) -> None:
    """A tile that is cut off would read beyond the tensor's end, though what it computes there is not stored."""
    told: list[bool] = []

    def launch(_kernel: Any, _grid: tuple[int, ...], *_arguments: Any, **constants: Any) -> None:
        told.extend(value for name, value in constants.items() if name == "WHOLE")

    window, x, weight = Window(stride, 1), images(2, inputs, 8, 8), weights(1, outputs, inputs, 3, 3)
    monkeypatch.setattr(convolution, "launch", launch)
    monkeypatch.setattr(weight_gradient, "launch", launch)
    y, _ = convolution.forward(x, weight, window)
    convolution.input_gradient(y, weight, window, x.shape)
    weight_gradient.weight_gradient(x, y, weight, window)
    assert told == [inputs == outputs == 64] * 3


@here
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("capability", "hip", "setting", "expected"),
    [
        ((9, 0), None, True, True),
        ((8, 0), None, True, True),
        ((9, 0), None, False, False),
        ((7, 5), None, True, False),  # a T4 has none: PyTorch computes float32 in full
        ((9, 4), "6.2", True, False),  # AMD's
    ],
)
def test_float32_is_predicted_by_kernels_where_pytorch_uses_tf32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, setting: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.Tensor, "device", GPU)
    x, weight = images(8, 3, 9, 9, dtype=torch.float32), weights(2, 4, 3, 3, 3, dtype=torch.float32)
    convolution._has_tf32.cache_clear()
    with torch.backends.cudnn.flags(allow_tf32=setting):
        assert convolution.fits_prediction(x, weight, Window(1, 1)) is expected
    convolution._has_tf32.cache_clear()
    assert convolution.fits_prediction(x.bfloat16(), weight.bfloat16(), Window(1, 1))


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 166912}, 166912),  # an A100
        ({"shared_memory_per_block": 65536}, 65536),  # AMD's
        ({"shared_memory_per_block": 65536, "shared_memory_per_block_optin": 0}, 65536),
    ],
)
def test_shared_memory_is_what_a_kernel_may_ask_for(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, int], expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    uncached: Callable[[Any], int] = convolution.shared_memory_of.__wrapped__
    assert uncached(GPU) == expected
