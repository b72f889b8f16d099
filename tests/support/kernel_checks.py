"""Compare each Triton kernel with float64 PyTorch: by Triton's interpreter on a CPU, or compiled on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import structured_ensembles as se
from structured_ensembles.cuda import batch_norm, convolution, subsampling
from structured_ensembles.cuda.batch_drawing import BatchDrawer
from structured_ensembles.cuda.batch_norm import Norm
from structured_ensembles.cuda.convolution import BlockSums, NormBefore, RunningNorm, Window
from structured_ensembles.cuda.operations import member_conv, member_norm, predict_conv
from structured_ensembles.cuda.weight_gradient import weight_gradient
from structured_ensembles.data.feeds import TableFeed, feed_for

here = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="needs Triton's interpreter, which is for machines without a GPU",
)

# The interpreter multiplies float32 exactly, and no bfloat16 at all; compiled kernels multiply bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CONVOLUTION_KERNELS = (
    "convolve_by_sweep", "convolve_by_rows", "convolve_by_taps", "convolve_back_strided", "weight_products_by_rows",
    "weight_products_by_sweep", "weight_products_by_taps", "merge_blocks",
)  # fmt: skip

EPS = 0.1  # of norms: as large as makes a difference
MARGIN = 1024  # numbers around a tensor that no kernel may read

LAUNCHED = {"subsample", "moments", "normalize", "gradient_sums", "input_gradient"}
LAUNCHED |= set(CONVOLUTION_KERNELS)  # others are called by these


@dataclass(frozen=True)
class Layer:
    """A convolution of stacked members, and the images that it gets."""

    members: int
    images: int
    inputs: int
    outputs: int
    height: int
    width: int
    rows: int = 3
    taps: int = 3
    stride: int = 1
    padding: int = 1

    @property
    def window(self) -> Window:
        return Window(self.stride, self.padding)

    def draw(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Draw images, weights and a gradient of the outputs, stored as the kernels want them, with NaN around each."""
        generator = torch.Generator().manual_seed(0)
        samples = self.members * self.images
        x = channels_last(torch.randn(samples, self.inputs, self.height, self.width, generator=generator))
        weight = torch.randn(self.members, self.outputs, self.rows, self.taps, self.inputs, generator=generator)
        sizes = [
            self.window.output_size(size, taps) for size, taps in ((self.height, self.rows), (self.width, self.taps))
        ]
        dy = channels_last(torch.randn(samples, self.outputs, *sizes, generator=generator))
        return (
            amid_nan(x.to(device, dtype)),
            amid_nan(weight.permute(0, 1, 4, 2, 3).to(device, dtype)),
            amid_nan(dy.to(device, dtype)),
        )


def amid_nan(x: Tensor) -> Tensor:
    """Copy a tensor to memory that has NaN before and after it: a kernel that multiplies these with zeros is found."""
    memory = x.new_full((x.numel() + 2 * MARGIN,), torch.nan)
    return memory.as_strided(x.shape, x.stride(), MARGIN).copy_(x)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare with a float64 reference, to the precision of the type that was computed in."""
    assert actual.shape == expected.shape
    close = TOLERANCE[dtype]
    scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
    torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close * scale, equal_nan=True)


def check_convolution(layer: Layer, dtype: torch.dtype, device: str) -> None:
    """Outputs and both gradients, with and without a sum."""
    x, weight, dy = layer.draw(dtype, device)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    y = member_conv(*exact, stride=layer.stride, padding=layer.padding)
    dx, dw = torch.autograd.grad(y, exact, dy.double())
    actual, no_sums = convolution.forward(x, weight, layer.window)
    assert no_sums is None
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert_near(actual, y.detach(), dtype)
    found_dx, no_sums = convolution.input_gradient(dy, weight, layer.window, x.shape)
    assert no_sums is None
    assert found_dx.is_contiguous(memory_format=torch.channels_last)
    assert_near(found_dx, dx, dtype)
    add = channels_last(torch.randn_like(x))
    found_dx, _ = convolution.input_gradient(dy, weight, layer.window, x.shape, add)
    assert_near(found_dx, dx + add.double(), dtype)
    found_dw = weight_gradient(x, dy, weight, layer.window)
    assert found_dw.dtype == torch.float32
    assert found_dw.permute(0, 1, 3, 4, 2).is_contiguous()
    assert_near(found_dw, dw, dtype)


def merged(sums: BlockSums) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of blocks in float64: mean, variance (members, channels), and the number of rows."""
    means, squares, counts = sums.partial.double().unbind(1)  # (members, blocks, channels)
    total = counts.sum(1)
    mean = (means * counts).sum(1) / total
    variance = (squares + counts * (means - mean[:, None]).square()).sum(1) / total
    return mean, variance, total


def by_channel(x: Tensor, members: int) -> Tensor:
    """Rearrange images (members × images, channels, height, width) to (members, rows, channels)."""
    return x.double().permute(0, 2, 3, 1).reshape(members, -1, x.shape[1])


def check_moments_of_convolution(layer: Layer, dtype: torch.dtype, device: str, guess: float = 0.0) -> None:
    """The epilogue leaves the moments of the outputs that are stored, whatever it was told to expect."""
    x, weight, _ = layer.draw(dtype, device)
    expected_mean = torch.full((layer.members, layer.outputs), guess, device=device)
    y, sums = convolution.forward(x, weight, layer.window, expected_mean)
    assert sums is not None
    rows = by_channel(y, layer.members)
    mean, variance, total = merged(sums)
    assert bool((total == rows.shape[1]).all())
    assert_near(mean, rows.mean(1), torch.float32)
    assert_near(variance, rows.var(1, correction=0), torch.float32)
    plain, _ = convolution.forward(x, weight, layer.window)
    assert torch.equal(y, plain)


def draw_norm(members: int, channels: int, device: str) -> Norm:
    generator = torch.Generator().manual_seed(1)
    weight, bias, mean = (torch.randn(members, channels, generator=generator).to(device) for _ in range(3))
    variance = torch.rand(members, channels, generator=generator).to(device) + 0.5
    return Norm(weight, bias, mean, variance, momentum=0.2, eps=EPS)


def check_norm_before(layer: Layer, mask: int, add: bool, dtype: torch.dtype, device: str) -> None:
    """The gradient behind the ReLU of the norm whose output a convolution reads, and the sums of that norm's gradient.

    mask: 0 no ReLU, 1 found from the norm's input, 2 from its output, to which something was added.
    """
    x, weight, dy = layer.draw(dtype, device)
    members = layer.members
    norm = draw_norm(members, layer.inputs, device)
    norm.weight[:, -1] = norm.bias[:, -1] = 0  # as of a padded channel: its outputs are 0, where a ReLU has no gradient
    norm_input = channels_last((3 + 2 * torch.randn_like(x).float()).to(dtype))
    rows = by_channel(norm_input, members)
    mean, scale = rows.mean(1), (rows.var(1, correction=0) + norm.eps).rsqrt()
    saved = torch.stack([mean, scale], 1).float()
    normalized = (rows - mean[:, None]) * scale[:, None]
    output = normalized * norm.weight.double()[:, None] + norm.bias.double()[:, None]
    if mask == 2:
        output = output + torch.randn_like(output)
    output = (output.relu() if mask else output).to(dtype)
    shaped = output.reshape(len(x), layer.height, layer.width, layer.inputs).permute(0, 3, 1, 2)
    assert shaped.is_contiguous(memory_format=torch.channels_last)
    before = NormBefore(norm_input, shaped if mask == 2 else norm_input, saved, norm.weight, norm.bias, mask)
    other = channels_last(torch.randn_like(x)) if add else None
    plain, _ = convolution.input_gradient(dy, weight, layer.window, x.shape, other)
    actual, sums = convolution.input_gradient(dy, weight, layer.window, x.shape, other, before)
    assert sums is not None
    behind = by_channel(plain, members) * ((output > 0) if mask else 1)
    assert_near(by_channel(actual, members), behind, dtype)
    assert_near(sums.partial[:, 0].double().sum(1), (behind * normalized).sum(1), dtype)
    assert_near(sums.partial[:, 1].double().sum(1), behind.sum(1), dtype)


def check_predicted_convolution(
    layer: Layer, finish: str, dtype: torch.dtype, device: str, *, relu: bool = False, shared: bool = False
) -> None:
    """Outputs of a convolution with what follows in prediction. finish: some of "bias", "norm" and "add".

    Images and weights have few digits, so that only the result is rounded, to bfloat16 or to TF32.
    """
    x, weight, dy = (amid_nan(tensor.bfloat16().to(dtype)) for tensor in layer.draw(torch.float32, device))
    x = x[: layer.images] if shared else x
    generator = torch.Generator().manual_seed(2)
    given = {
        "bias": torch.randn(layer.members, layer.outputs, generator=generator).to(device),
        "norm": draw_norm(layer.members, layer.outputs, device),
        "add": dy,
    }
    bias, norm, add = (given[name] if name in finish else None for name in given)
    running = None
    if norm is not None:
        running = RunningNorm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
    y = convolution.predict(x, weight, layer.window, bias, running, add, relu=relu, shared=shared)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.dtype == dtype
    tensors = [None] * 4 if norm is None else [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    arguments = [None if tensor is None else tensor.double() for tensor in (x, weight, bias, *tensors, add)]
    options = {"stride": layer.stride, "padding": layer.padding, "relu": relu, "shared": shared}
    expected = predict_conv(*arguments, eps=EPS, **options)  # type: ignore[arg-type]
    assert y.shape == expected.shape
    close = 2**-10 if dtype == torch.float32 else 2**-7
    scale = float(expected.abs().max())
    torch.testing.assert_close(y.double(), expected, rtol=close, atol=2e-5 * scale)


def check_tf32_is_rounded(device: str) -> None:
    """The input of a network, weights and outputs are rounded to the nearest TF32, and neither NaN nor inf is lost."""
    x = channels_last(torch.randn(2, 8, 5, 5, device=device))
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000], dtype=torch.int32)  # a GPU's NaN, inf and -inf
    x[0, 0, 0, :3] = bits.view(torch.float32)
    identity = torch.eye(8, device=device).reshape(1, 8, 1, 1, 8).permute(0, 1, 4, 2, 3)
    rounded = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    clean = x.clone()
    clean[0, :, 0, :3] = 1.0  # 0 · inf is a NaN in all other channels
    y = convolution.predict(clean, identity, Window(), shared=True)
    assert torch.equal(y[1], rounded[1])
    assert torch.equal(y[0, :, 1:], rounded[0, :, 1:])
    dense = torch.randn(1, 8, 1, 1, 8, device=device).permute(0, 1, 4, 2, 3)
    lost_digits = convolution.predict(clean, dense, Window()).view(torch.int32) & 0x1FFF
    assert lost_digits.count_nonzero() == 0
    ones = channels_last(torch.ones_like(x))
    weights = torch.randn(1, 8, 1, 1, 8, device=device).permute(0, 1, 4, 2, 3)
    weights = weights * identity
    exact = ((weights.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).sum((0, 2, 3, 4))
    weights = weights.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert torch.equal(convolution.predict(ones, weights, Window())[0, :, 0, 0], exact)
    y = convolution.predict(x, identity, Window(), relu=True, shared=True)
    assert y[0, :, 0, :3].isnan().sum(0).tolist() == [8, 7, 7]  # inf · 0 is a NaN
    assert y[0, 0, 0, 1:3].tolist() == [torch.inf, 0.0]


def check_batch_norm(
    shape: tuple[int, ...], members: int, dtype: torch.dtype, device: str, *, add: bool = False, relu: bool = False
) -> None:
    """Outputs, statistics and gradients of a batch norm, with a sum and a ReLU; its inputs have a mean of 100."""
    torch.manual_seed(0)
    x, dy, other = (channels_last(torch.randn(shape, device=device).to(dtype)) for _ in range(3))
    x += 100
    if relu:  # no gradient where the sign depends on rounding
        dy *= _norm_output(x, draw_norm(members, shape[1], device), other if add else None).abs() > 1e-3
    norm, reference = (draw_norm(members, shape[1], device) for _ in range(2))
    mask = (2 if add else 1) if relu else 0
    sums = batch_norm.moments(x, members)
    y, saved = batch_norm.normalize(x, sums, norm, other if add else None, relu)
    masked, dy_sums = batch_norm.gradient_sums(dy, x, y, saved, norm, mask)
    dx, parameter_gradients = batch_norm.input_gradient(masked, dy_sums, x, saved, norm)

    exact = [tensor.double().requires_grad_() for tensor in (x, reference.weight, reference.bias, other)]
    statistics = [reference.running_mean.double(), reference.running_var.double()]
    options = {"momentum": norm.momentum, "eps": norm.eps, "relu": relu}
    expected = member_norm(*exact[:3], *statistics, exact[3] if add else None, **options)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(expected, exact, dy.double(), allow_unused=True)
    expected_dx, expected_weight, expected_bias, expected_other = gradients
    mean, variance, _ = merged(sums)
    rows = by_channel(x, members)
    assert_near(mean, rows.mean(1), torch.float32)
    assert_near(variance, rows.var(1, correction=0), torch.float32)
    close = max(TOLERANCE[dtype], 1e-4)  # 100 ± 1 in float32 has five digits
    for actual, wanted in (
        (y, expected.detach()), (norm.running_mean, statistics[0]), (norm.running_var, statistics[1]),
        (dx, expected_dx), (parameter_gradients[0], expected_weight), (parameter_gradients[1], expected_bias),
        *([(masked, expected_other)] if add else []),
    ):  # fmt: skip
        assert wanted is not None
        scale = float(wanted.abs().max())
        torch.testing.assert_close(actual.double(), wanted, rtol=close, atol=close * (scale + 1))


def _norm_output(x: Tensor, norm: Norm, add: Tensor | None) -> Tensor:
    """Compute a batch norm and a sum in float64."""
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    exact = [tensor.double() for tensor in tensors]
    other = None if add is None else add.double()
    return member_norm(x.double(), *exact, other, momentum=0.0, eps=norm.eps)


def check_nan_passes_relu(device: str) -> None:
    """A NaN in the input of a batch norm is one in its output: a ReLU must not make it zero."""
    x = channels_last(torch.randn(4, 8, 3, 3, device=device))
    x[0, 0, 0, 0] = torch.nan
    norm = draw_norm(2, 8, device)
    y, _ = batch_norm.normalize(x, batch_norm.moments(x, 2), norm, None, relu=True)
    assert bool(y[:2, 0].isnan().all())
    assert not y[:2, 1:].isnan().any()
    assert not y[2:].isnan().any()


def check_padded_channels_of_norm(device: str) -> None:
    """Channels of zeros, with weights of zero, stay zero: outputs, gradients, and what would be learned."""
    x, dy = (channels_last(torch.randn(12, 16, 5, 5, device=device)) for _ in range(2))
    x[:, 13:] = dy[:, 13:] = 0
    norm = draw_norm(2, 16, device)
    norm.weight[:, 13:] = norm.bias[:, 13:] = 0
    y, saved = batch_norm.normalize(x, batch_norm.moments(x, 2), norm, None, relu=True)
    masked, sums = batch_norm.gradient_sums(dy, x, x, saved, norm, 1)
    dx, _ = batch_norm.input_gradient(masked, sums, x, saved, norm)
    assert y[:, 13:].count_nonzero() == dx[:, 13:].count_nonzero() == 0


def check_subsample(shape: tuple[int, ...], stride: int, channels: int, dtype: torch.dtype, device: str) -> None:
    """Every stride-th pixel and appended zeros, exactly; and the gradient, zero where pixels were left out."""
    x = channels_last(torch.randn(shape, device=device).to(dtype))
    y = subsampling.subsample(x, stride, channels)
    kept = x[:, :, ::stride, ::stride]
    assert torch.equal(y[:, : shape[1]], kept)
    assert y[:, shape[1] :].count_nonzero() == 0
    assert y.shape[1] == channels
    dy = channels_last(torch.randn_like(y))
    expected = torch.zeros_like(x)
    expected[:, :, ::stride, ::stride] = dy[:, : shape[1]]
    assert torch.equal(subsampling.subsample_gradient(dy, stride, x.shape), expected)


def check_copier(device: str, make: Callable[[list[tuple[Tensor, Tensor]]], Callable[[], None]]) -> None:
    """Copy pairs that are contiguous, padded, permuted, long, stored in another order, empty, or not float32."""
    stacked = torch.zeros(2, 16, 3, 3, 8, dtype=torch.bfloat16, device=device).permute(0, 1, 4, 2, 3)
    weight = torch.randn(13, 6, 3, 3, device=device)
    padded = torch.zeros(16, 24, device=device)
    pairs = [
        (torch.zeros(3000, device=device), torch.randn(3000, device=device)),
        (torch.zeros(3000, dtype=torch.bfloat16, device=device), torch.randn(3000, device=device)),
        (padded[:13, :20], torch.randn(13, 20, device=device)),
        (stacked[0, :13, :6], weight.to(memory_format=torch.channels_last)),
        (stacked[1, :13, :6], weight.clone()),
        (torch.zeros((), dtype=torch.bfloat16, device=device), torch.randn((), device=device)),
        (torch.zeros(5, dtype=torch.float64, device=device), torch.randn(5, dtype=torch.float64, device=device)),
        (torch.zeros(4, dtype=torch.float16, device=device), torch.randn(4, device=device)),
        (torch.zeros(7, 2, device=device)[:, 0], torch.randn(7, device=device)),
        (torch.zeros(3, 700, 2, device=device).permute(0, 2, 1), torch.randn(3, 2, 700, device=device)),
        (torch.zeros(1100, 3, device=device).T, torch.randn(3, 1100, device=device)),
        (torch.zeros(3, 1100, device=device), torch.randn(1100, 3, device=device).T),
        (torch.zeros(4, 0, device=device), torch.zeros(4, 0, device=device)),
    ]
    copy = make(pairs)
    for _ in range(2):
        copy()
        for target, source in pairs:
            # The interpreter cuts bfloat16 off where a GPU rounds.
            close = 2**-7 if target.dtype == torch.bfloat16 and device == "cpu" else 0.0
            torch.testing.assert_close(target, source.to(target.dtype), rtol=close, atol=0)
            source.mul_(-3)
    assert padded[13:].count_nonzero() == padded[:, 20:].count_nonzero() == 0
    assert stacked[:, 13:].count_nonzero() == stacked[:, :, 6:].count_nonzero() == 0


def check_drawn_batch(
    augmentation: str,
    shape: tuple[int, int, int],
    members: int,
    device: str,
    normalization: str = "standard",
    *,
    dtype: torch.dtype | None = None,
    last: bool = False,
    mixup: float = 0.0,
) -> None:
    """Compare the kernel with the feeds' own twenty operations, for a whole and for the last, smaller batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.arange(50) % 7
    data = se.Data.from_arrays(images, labels, classes=7, validation=0.2, normalization=normalization).to(device)
    shared = feed_for(data.train, data, 16, torch.device(device), augmentation=augmentation, mixup=mixup)  # type: ignore[arg-type]
    assert isinstance(shared, TableFeed)
    feeds = [shared.for_member() for _ in range(members)]
    drawer = BatchDrawer(feeds, dtype, channels_last=last)
    for number, feed in enumerate(feeds):
        feed.shuffle(5 + number, 50 + number)  # after the tables were stacked: they are views now
    for index, size in enumerate(shared.tables.batches):
        shared.step.fill_(index)
        inputs, drawn_labels = drawer.batch(size)
        expected, expected_labels = (
            torch.cat(parts) for parts in zip(*(feed.batch(size) for feed in feeds), strict=True)
        )
        assert inputs.dtype == (dtype or torch.float32)
        assert inputs.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        close = 1e-5 if dtype is None else 1e-2
        torch.testing.assert_close(inputs.float(), expected, rtol=close, atol=close)
        assert torch.equal(drawn_labels, expected_labels)
    assert [index, size] == [2, 10]


class Recorder:
    """Stand in for a kernel: note its name at each launch, and launch it unless `dry`."""

    def __init__(self, kernel: Any, names: list[str], dry: bool) -> None:
        self.kernel, self.names, self.dry = kernel, names, dry
        self.name = kernel.fn.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.names.append(self.name)
            if not self.dry:
                self.kernel[grid](*arguments, **named)

        return launch

    def warmup(self, *arguments: Any, **named: Any) -> Any:
        """Compile the kernel: no launch."""
        return None if self.dry else self.kernel.warmup(*arguments, **named)


@contextmanager
def recorded_launches(dry: bool = False) -> Iterator[list[str]]:
    """List the names of the kernels that are launched. dry: launch none of them."""
    from structured_ensembles.cuda.kernels import batch_norm as norm_kernels
    from structured_ensembles.cuda.kernels import convolution as convolution_kernels
    from structured_ensembles.cuda.kernels import subsampling as subsampling_kernels
    from structured_ensembles.cuda.kernels import weight_gradient, wide_convolution

    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (norm_kernels, convolution_kernels, wide_convolution, weight_gradient, subsampling_kernels):
            for name in LAUNCHED & vars(module).keys():
                patch.setattr(module, name, Recorder(getattr(module, name), names, dry))
        yield names
