"""Draw random convolutional networks with Hypothesis."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

ACTIVATIONS = [nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Mish, nn.Softplus]

KINDS = (
    *("conv", "conv", "norm", "activation", "pool", "residual", "dense", "gate", "linear_gate", "halves", "widen"),
    *("depthwise", "hard_coded", "channels_last", "glu", "resize", "roundtrip", "prelu", "group_norm", "transposed"),
    *("grouped", "shuffle", "attention"),
)


class Residual(nn.Module):
    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(channels, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.b = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.norm(self.a(x))))


class Widen(nn.Module):
    """A zero-padded shortcut around a convolution that has more channels."""

    def __init__(self, channels: int, more: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels + more, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        return out + F.pad(x, (0, 0, 0, 0, 0, out.shape[1] - x.shape[1]))


class Dense(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class Gate(nn.Module):
    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


class LinearGate(nn.Module):
    """The same with linear layers, as many write it."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, inner), nn.Linear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return x * gate.view(x.shape[0], -1, 1, 1).expand_as(x)


class Halves(nn.Module):
    """Cut in two, work on one half, join again."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels // 2, channels // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return torch.cat([self.conv(left), right], 1)


class HardCoded(nn.Module):
    """Code that knows how many channels there are: must be found out and left alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.conv = channels, nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x.view(x.shape[0], self.channels, *x.shape[2:]) * (1 / self.channels)


class ChannelsLast(nn.Module):
    """A linear layer over the channels of a permuted image."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).transpose(1, 3).transpose(2, 3).contiguous()


class Glu(nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.conv(x), dim=1)


class Resize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest")[:, :, 1:-1, 1:-1]


class Shuffle(nn.Module):
    """A shuffle of channels, as between the grouped convolutions of a ShuffleNet."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)


class Attention(nn.Module):
    """Attention between pixels, with two heads; `hard` code knows their size."""

    def __init__(self, channels: int, size: int, hard: bool) -> None:
        super().__init__()
        self.size, self.hard = size, hard
        self.qkv, self.proj = nn.Linear(channels, 6 * size), nn.Linear(2 * size, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        qkv = self.qkv(tokens).view(*tokens.shape[:2], 3, 2, self.size if self.hard else -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = (q @ k.mT * 0.4).softmax(-1) @ v if self.hard else F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.transpose(1, 2).flatten(2)).mT.reshape(x.shape)


class Roundtrip(nn.Module):
    """Flatten and put together again."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).squeeze(-1).unsqueeze(1).squeeze(1).view(x.shape)


def make_layer(draw: st.DrawFn, channels: int, size: int) -> tuple[nn.Module, int, int]:  # noqa: PLR0912
    """One random layer for images of `size` with `channels`; returns it with the channels and size of its output."""
    kind = draw(st.sampled_from(KINDS))
    more = draw(st.integers(2, 7))
    match kind:
        case "conv":
            stride = draw(st.sampled_from([1, 2])) if size > 2 else 1
            layer = nn.Conv2d(channels, more, 3, stride, padding=1, bias=draw(st.booleans()))
            return layer, more, -(-size // stride)
        case "transposed":
            return nn.ConvTranspose2d(channels, more, 3, padding=1), more, size
        case "norm":
            affine = draw(st.booleans())
            return nn.BatchNorm2d(channels, affine=affine), channels, size
        case "activation":
            return draw(st.sampled_from(ACTIVATIONS))(), channels, size
        case "pool" if size >= 2:
            return draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2)])), channels, size // 2
        case "residual":
            return Residual(channels, more), channels, size
        case "dense":
            return Dense(channels, more), channels + more, size
        case "gate":
            return Gate(channels, more), channels, size
        case "linear_gate":
            return LinearGate(channels, more), channels, size
        case "halves" if channels % 2 == 0:
            return Halves(channels), channels, size
        case "widen":
            return Widen(channels, more), channels + more, size
        case "depthwise":
            multiplier = draw(st.integers(1, 2))
            layer = nn.Conv2d(channels, multiplier * channels, 3, padding=1, groups=channels)
            return layer, multiplier * channels, size
        case "grouped" if channels % 2 == 0:
            outputs = 2 * more
            layer = draw(st.sampled_from([nn.Conv2d, nn.ConvTranspose2d]))(channels, outputs, 3, padding=1, groups=2)
            return layer, outputs, size
        case "shuffle" if channels % 2 == 0:
            return Shuffle(draw(st.sampled_from([2, channels // 2]))), channels, size
        case "attention":
            return Attention(channels, more, draw(st.booleans())), channels, size
        case "hard_coded":
            return HardCoded(channels), channels, size
        case "channels_last":
            return ChannelsLast(channels, more), more, size
        case "glu":
            return Glu(channels, more), more, size
        case "resize" if size <= 4:
            return Resize(), channels, 2 * size - 2 if size > 1 else 0
        case "prelu":
            return nn.PReLU(channels), channels, size
        case "group_norm":
            return nn.GroupNorm(2 if channels % 2 == 0 and draw(st.booleans()) else 1, channels), channels, size
    return Roundtrip(), channels, size


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    channels, size = 4, 6
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(draw(st.integers(1, 8))):
        layer, new_channels, new_size = make_layer(draw, channels, size)
        if new_size > 0:
            layers.append(layer)
            channels, size = new_channels, new_size
    if draw(st.booleans()):
        layers += [nn.AdaptiveAvgPool2d(draw(st.sampled_from([1, 2]))), nn.Flatten()]
        inputs = channels * layers[-2].output_size ** 2
    else:
        layers.append(nn.Flatten())
        inputs = channels * size * size
    layers += [nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, 3)]
    return nn.Sequential(*layers)
