"""Convolutions that finish their outputs in prediction, and a batch that all members share."""

import torch
from torch import nn

from structured_ensembles.cuda.passes import (
    fuse_predictions,
    fuse_running_norms,
    replace_layers,
    share_inputs,
    stack_members,
)
from structured_ensembles.cuda.program import Program, export_program
from tests.support.programs import Model, check_prediction_pass, conv, images, norm, operations, predicted

BEFORE = (replace_layers, fuse_running_norms)


def check(network: nn.Module) -> list[str]:
    """Check `fuse_predictions`; return the operations that are left."""
    return operations(check_prediction_pass(network, images(), fuse_predictions, BEFORE))


def fused(network: nn.Module, members: int) -> Program:
    program = export_program(network, images(), training=False)
    for rewrite in (*BEFORE, fuse_predictions):
        program = rewrite(program)
    return stack_members(program, members)


def test_batch_norm_sum_and_relu_are_finished_by_the_convolution() -> None:
    block = Model(
        lambda self, x: torch.relu(self.n(self.c(x)) + self.skip(x)), c=conv(bias=True), n=norm(), skip=conv(padding=1)
    )
    assert check(block) == ["predict_conv", "predict_conv"]


def test_the_sum_may_come_from_either_side() -> None:
    for forward in (lambda self, x: self.n(self.c(x)) + self.d(x), lambda self, x: self.d(x) + self.n(self.c(x))):
        assert check(Model(forward, c=conv(), n=norm(), d=conv())) == ["predict_conv", "predict_conv"]


def test_a_convolution_without_a_norm_is_finished_too() -> None:
    network = Model(lambda self, x: torch.relu(self.c(x)), c=conv(bias=True))
    assert check(network) == ["predict_conv"]
    assert check(Model(lambda self, x: self.c(x) + x, c=conv(3, 3))) == ["predict_conv"]


def test_a_norm_without_weights_is_fused() -> None:
    assert check(nn.Sequential(conv(), norm(affine=False), nn.ReLU())) == ["predict_conv"]


def test_a_norm_that_others_read_as_well_is_not_lost() -> None:
    twice = Model(lambda self, x: (y := self.n(self.c(x))) * torch.relu(y), c=conv(), n=norm())
    assert check(twice) == ["predict_conv", "relu", "mul"]


def test_a_convolution_that_others_read_as_well_is_not_lost() -> None:
    twice = Model(lambda self, x: self.n(y := self.c(x)) + y, c=conv(), n=norm())
    assert check(twice) == ["predict_conv", "running_norm"]
    assert check(Model(lambda self, x: self.n(y := self.c(x)) * y, c=conv(), n=norm())) == [
        "predict_conv",
        "running_norm",
        "mul",
    ]


def test_a_convolution_added_to_itself_is_not_fused_with_the_sum() -> None:
    assert check(Model(lambda self, x: (y := self.c(x)) + y, c=conv())) == ["predict_conv", "add"]


def test_all_members_read_one_batch() -> None:
    members = [nn.Sequential(conv(), norm(), nn.ReLU(), conv(4, 4)) for _ in range(3)]
    program = share_inputs(fused(members[0], 3))
    assert [node.kwargs.get("shared") for node in program.nodes if node.op == "call_function"] == [True, None]
    outputs, expected = predicted(program, members, images(5))
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)


def test_what_is_not_a_convolution_reads_a_copy_for_each_member() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.c(x) + self.d(torch.tanh(x)).view(x.size(0), 3, 6, 6) + x

    members = [Model(forward, c=conv(3, 3), d=conv(3, 3)) for _ in range(2)]
    program = share_inputs(fused(members[0], 2))
    assert operations(str(program)).count("repeat_members") == 1
    outputs, expected = predicted(program, members, images(5))
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
