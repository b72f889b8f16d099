"""Programs for prediction compute what the networks do in evaluation mode, and follow changed weights."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import prediction
from structured_ensembles.cuda.prediction import (
    MemberPredictions,
    check_prediction,
    compile_prediction,
    compile_predictions,
)
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.evaluation.memory import measure_peak_memory
from tests.support.programs import Model, conv, images, norm, operations


def small(width: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [conv(3, width), norm(width), nn.ReLU(), conv(width, 8, bias=True), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()


def compiled(networks: Sequence[nn.Module], x: Any, *fallbacks: str) -> list[MemberPredictions]:
    """Compile predictions; check the fallbacks that were told of."""
    told: list[str] = []
    results = compile_predictions(networks, x, False, told.append)
    assert len(told) == len(fallbacks)
    assert all(expected in actual for expected, actual in zip(fallbacks, told, strict=True)), told
    return [MemberPredictions(one, networks) for one in results]


@torch.no_grad()
def check(networks: Sequence[nn.Module], x: Any) -> str:
    """All networks share a program, whose outputs are theirs; returns it, printed."""
    (program,) = compiled(networks, x)
    assert program.numbers == tuple(range(len(networks)))
    inputs = x if isinstance(x, tuple) else (x,)
    expected = torch.stack([network(*inputs) for network in networks])
    torch.testing.assert_close(program.outputs(x), expected, rtol=1e-4, atol=1e-5)
    return str(program.program)


def test_members_of_different_widths_share_a_program() -> None:
    printed = check([small(5, 1), small(8, 2), small(6, 3)], images(5))
    assert operations(printed) == ["predict_conv", "predict_conv", "adaptive_avg_pool2d", "flatten", "member_linear"]


def test_halves_of_a_resnet20() -> None:
    torch.manual_seed(0)
    base, x = se.zoo.resnet20(), torch.randn(3, 3, 32, 32)
    graph = se.trace(base, x)
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    networks = [se.extract(base, graph, subnet).eval() for subnet in subnets]
    for network in networks:
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()  # type: ignore[union-attr]
                layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    left = operations(check(networks, x))
    assert {name: left.count(name) for name in left} == {
        "predict_conv": 19,
        "subsample": 2,
        "mean": 1,
        "member_linear": 1,
    }


def test_check_holds_one_copy_of_a_network_at_a_time() -> None:
    """The stack in double precision is twice the weights; it is gone when copies of networks come one by one."""
    networks = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)).eval() for _ in range(2)]
    weights = sum(parameter.nbytes for network in networks for parameter in network.parameters())
    example = torch.randn(2, 64)
    program = compile_prediction(networks[0], example, len(networks))
    shapes = {name: tuple(tensor.shape) for name, tensor in networks[0].state_dict().items()}
    assert measure_peak_memory(lambda: check_prediction(program, networks, shapes, example)) < 2.2 * weights


@pytest.mark.parametrize("samples", [1, 2, 9])
def test_batches_of_any_size(samples: int) -> None:
    check([small(seed=1), small(seed=2)], images(samples))


def test_several_inputs_and_one_network() -> None:
    def forward(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return self.line(torch.cat([self.c(x).flatten(1), y], 1))

    networks = [Model(forward, c=conv(), line=nn.Linear(146, 3)).eval() for _ in range(2)]
    inputs = images(), torch.randn(2, 2)
    assert "repeat_members" in check(networks, inputs)
    check(networks[:1], inputs)


def test_changed_weights_and_statistics_are_seen() -> None:
    networks, x = [small(seed=1), small(seed=2)], images(3)
    (program,) = compiled(networks, x)
    with torch.no_grad():
        for network in networks:
            for tensor in (*network.parameters(), network[1].running_mean, network[1].running_var):
                tensor.data.mul_(1.5)  # not counted as a change by PyTorch
        expected = torch.stack([network(x) for network in networks])
    torch.testing.assert_close(program.outputs(x), expected, rtol=1e-5, atol=1e-5)


def test_modes_weights_and_inputs_stay() -> None:
    networks, x = [small(seed=1), small(7, seed=2)], images(3)
    networks[0][7].train()
    before = [tensor.clone() for network in networks for tensor in network.state_dict().values()]
    unchanged = x.clone()
    compiled(networks, x)[0].outputs(x)
    assert torch.equal(x, unchanged)
    after = [tensor for network in networks for tensor in network.state_dict().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert [layer.training for layer in networks[0]] == [False] * 7 + [True, False]


def switched(self: Model, x: Tensor) -> Tensor:
    """Depend on a value of the input, so that export cannot follow."""
    return self.c(x) if bool(x.sum() > 0) else -self.c(x)


def test_networks_that_have_no_program_are_told_of() -> None:
    hooked = small()
    hooked[0].register_forward_hook(lambda *_: None)
    assert compiled([hooked], images(), "has hooks") == []
    assert compiled([Model(switched, c=conv())], images(), "cannot be exported") == []
    always = Model(lambda self, x: F.dropout(self.c(x), 0.5, training=True), c=conv())
    assert compiled([always], images(), "draws random numbers") == []
    mixing = [Model(lambda self, x: self.c(x) - x.mean(0), c=conv(3, 3)).eval() for _ in range(2)]
    assert [one.numbers for one in compiled(mixing, images(), "one by one")] == [(0,), (1,)]


def test_networks_with_wide_convolutions_or_none_are_left_to_pytorch() -> None:
    assert compiled([Model(lambda self, x: self.c(x), c=conv(3, 136))], images()) == []
    assert compiled([nn.Sequential(nn.Flatten(), nn.Linear(108, 3))], images()) == []


def test_convolutions_without_a_kernel_are_told_of() -> None:
    for options in ({"groups": 2}, {"dilation": 2}):
        network = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 4, **options))
        assert compiled([network], images(), "no kernel for aten.conv2d") == []


def test_members_of_two_kinds_have_two_programs() -> None:
    networks = [small(), nn.Sequential(conv(), nn.Flatten(), nn.Linear(144, 3)), small(seed=1)]
    assert [one.numbers for one in compiled(networks, images())] == [(0, 2), (1,)]


def test_a_wrong_program_is_found() -> None:
    (right,) = compile_predictions([small()], images(), False, print)
    other = Model(lambda self, x: 2 * self.line(x), line=small())
    names = {placeholder: f"line.{name}" for placeholder, name in right.program.names.items()}
    wrong = prediction.replace(right.program, names=names)
    shapes = {f"line.{name}": shape for name, shape in right.shapes.items()}
    with pytest.raises(ProgramError, match="other outputs"):
        check_prediction(wrong, [other], shapes, images())
