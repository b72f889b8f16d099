"""Stacked weights: padded with zeros, refreshed from the members, and their gradients and statistics given back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.cuda.compilation import compile_network
from structured_ensembles.cuda.pair_copies import copier, copy_all
from structured_ensembles.cuda.program import export_program
from structured_ensembles.cuda.stacking import Stack, unpadded
from tests.support.programs import Model, assert_equal, conv, images, norm, results_of, results_of_network


def network(width: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(conv(3, width), norm(width), nn.ReLU(), conv(width, 5), nn.Flatten(), nn.Linear(180, 3))


def placeholder_of(stack: Stack, program: Any, name: str) -> str:
    (placeholder,) = (placeholder for placeholder, own_name in program.names.items() if own_name == name)
    return placeholder


def test_narrower_members_are_padded_with_zeros() -> None:
    wide, members = network(8), [network(4, seed=1), network(7, seed=2)]
    program = compile_network(wide, images())
    shapes = {name: tuple(tensor.shape) for name, tensor in wide.state_dict().items()}
    stack = Stack(program, members, shapes)
    weight = stack.weights[placeholder_of(stack, program, "0.weight")]
    assert weight.shape == (2, 8, 3, 3, 3)
    assert weight.permute(0, 1, 3, 4, 2).is_contiguous()
    for number, (member, width) in enumerate(zip(members, (4, 7), strict=True)):
        assert torch.equal(weight[number, :width], member[0].weight)
        assert weight[number, width:].count_nonzero() == 0
    reading = stack.weights[placeholder_of(stack, program, "3.weight")]
    assert reading.shape == (2, 5, 8, 3, 3)
    assert reading[0, :, 4:].count_nonzero() == 0
    assert stack.learned == {
        placeholder for placeholder, name in program.names.items() if name in dict(wide.named_parameters())
    }


def test_padded_members_compute_what_they_do_alone() -> None:
    wide, members = network(8), [network(4, seed=1), network(7, seed=2)]
    program = compile_network(wide, images())
    shapes = {name: tuple(tensor.shape) for name, tensor in wide.state_dict().items()}
    examples = [images(3, seed=1), images(3, seed=2)]
    actual = results_of(program, members, examples, shapes)
    for results, member, example in zip(actual, members, examples, strict=True):
        assert_equal(results, results_of_network(member, example, program.counters))


def test_what_padding_would_learn_is_dropped() -> None:
    wide, member = network(8), network(4)
    program = compile_network(wide, images())
    stack = Stack(program, [member], {name: tuple(tensor.shape) for name, tensor in wide.state_dict().items()})
    gradients = {placeholder: torch.randn_like(stack.weights[placeholder]) for placeholder in stack.learned}
    stack.set_gradients(gradients)
    for placeholder, gradient in gradients.items():
        parameter = member.get_parameter(program.names[placeholder])
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert torch.equal(parameter.grad, unpadded(gradient[0], parameter.shape))


def test_gradients_have_the_type_and_layout_of_their_parameters() -> None:
    member = network()
    program = compile_network(member, images())
    stack = Stack(program, [member], {})
    gradients = {
        placeholder: torch.randn_like(stack.weights[placeholder]).double() for placeholder in sorted(stack.learned)[:-1]
    }
    stack.set_gradients(gradients)
    for parameter in member.parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.stride() == parameter.stride()
    assert sum(parameter.grad is None for parameter in member.parameters()) == 1  # for which there was none


def test_refresh_copies_what_the_optimizer_has_changed() -> None:
    members = [network(seed=seed) for seed in range(2)]
    program = compile_network(members[0], images())
    cast = {placeholder for placeholder, name in program.names.items() if name in ("0.weight", "5.bias")}
    stack = Stack(program, members, {}, cast)
    before = stack.tensors()
    with torch.no_grad():
        for member in members:
            for parameter in member.parameters():
                parameter.mul_(-2)
    stack.refresh()
    assert all(one is other for one, other in zip(before, stack.tensors(), strict=True))
    for placeholder, name in program.names.items():
        if name in dict(members[0].named_parameters()):
            stacked = stack.weights[placeholder]
            assert stacked.dtype == (torch.bfloat16 if placeholder in cast else torch.float32)
            for number, member in enumerate(members):
                assert torch.equal(stacked[number], member.get_parameter(name).to(stacked.dtype))


def test_statistics_go_there_and_back() -> None:
    members = [network(seed=seed) for seed in range(2)]
    program = compile_network(members[0], images())
    stack = Stack(program, members, {})
    mean = stack.weights[placeholder_of(stack, program, "1.running_mean")]
    mean.copy_(torch.arange(8.0).view(2, 4))
    stack.store_statistics()
    assert members[1][1].running_mean.tolist() == [4.0, 5.0, 6.0, 7.0]
    members[0][1].running_mean.fill_(9)
    stack.load_statistics()
    assert mean[0].tolist() == [9.0] * 4
    assert mean[1].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_counters_of_batches_are_left_to_the_networks() -> None:
    """They are advanced there, all of them by one kernel; a stale copy must not overwrite them."""
    member = network()
    program = compile_network(member, images())
    assert program.counters == ("1.num_batches_tracked",)
    stack = Stack(program, [member], {})
    member[1].num_batches_tracked.fill_(7)
    stack.store_statistics()
    assert member[1].num_batches_tracked == 7
    assert not [name for name in stack.weights if "num_batches" in name]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


def test_tied_weights_have_one_gradient() -> None:
    tied, x = Tied(), torch.randn(2, 6)
    program = compile_network(tied, x)
    stack = Stack(program, [tied], {})
    expected = results_of_network(tied, x)["first.weight.grad"]
    results_of(program, [tied], [x])
    from structured_ensembles.cuda.running import Run

    run = Run(program, stack.weights, stack.learned, None)
    outputs = run.forward([x])
    stack.set_gradients(run.backward(torch.linspace(-1, 2, 12).view(outputs.shape)))
    assert tied.first.weight.grad is not None
    torch.testing.assert_close(tied.first.weight.grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_members_share_no_memory() -> None:
    member = network()
    stack = Stack(export_program(member, images()), [member, member], {})
    addresses = {tensor.data_ptr() for tensor in stack.tensors()}
    assert not addresses & {tensor.data_ptr() for tensor in member.state_dict().values()}
    for tensor in stack.tensors():
        tensor[0] = 0
        assert tensor[1].data_ptr() != tensor[0].data_ptr()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (3, 1, 2)])
def test_unpadded_cuts_every_axis(shape: tuple[int, ...]) -> None:
    whole = torch.randn([size + 2 for size in shape])
    assert torch.equal(unpadded(whole, shape), whole[tuple(slice(size) for size in shape)])
    assert unpadded(whole, whole.shape) is whole


def test_copies_of_any_layout_and_type() -> None:
    sources = [torch.randn(3, 4), torch.randn(4, 3).T, torch.randn(3, 4).double()]
    for targets in ([torch.zeros(3, 4) for _ in range(3)], [torch.zeros(3, 8)[:, ::2] for _ in range(3)]):
        copy_all(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.to(target.dtype))
    copy_all([], [])
    copier([])()


def test_a_copier_reads_the_sources_anew() -> None:
    source, target = torch.zeros(5), torch.zeros(5)
    copy = copier([(target, source)])
    for number in (1, 2):
        source.fill_(number)
        copy()
        assert target.tolist() == [number] * 5


def test_a_network_without_parameters_in_a_layer_is_stacked() -> None:
    scaled = Model(lambda self, x: self.c(x) * self.scale, c=conv(), scale=nn.Parameter(torch.rand(4, 1, 1)))
    program = compile_network(scaled, images())
    assert_equal(results_of(program, [scaled], [images()])[0], results_of_network(scaled, images()))
