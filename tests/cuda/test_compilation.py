"""Networks are compiled together where they can share a program; each program is tried; what is refused says why."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import compilation
from structured_ensembles.cuda.compilation import Compiled, compile_network, compile_networks, has_hooks
from structured_ensembles.cuda.operations import member_norm
from structured_ensembles.cuda.program import Program, ProgramError
from structured_ensembles.cuda.running import Run
from tests.support.networks import Nested, Sparse, Viewing
from tests.support.programs import Model, conv, images, norm, operations
from tests.support.user_models import Renamed


def member(width: int = 8, seed: int = 0, dropout: float = 0.0, momentum: float = 0.1) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [conv(3, width), norm(width, momentum=momentum), nn.ReLU(), nn.Dropout(dropout), conv(width, 6)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def compiled(
    networks: Sequence[nn.Module], example: Any = None, *, bfloat16: bool = False, together: bool = True
) -> tuple[list[Compiled], list[str]]:
    told: list[str] = []
    programs = compile_networks(networks, images() if example is None else example, bfloat16, together, told.append)
    return programs, told


def test_members_of_different_widths_share_one_program() -> None:
    (one,), told = compiled([member(8), member(6, seed=1), member(7, seed=2)])
    assert told == []
    assert one.numbers == (0, 1, 2)
    assert one.program.members == 3
    assert one.shapes["0.weight"] == (8, 3, 3, 3)
    assert one.bfloat16 == frozenset()
    assert one.of_members(2).program.members == 2
    assert operations(str(one.program)) == [
        "conv_norm",
        "member_conv",
        "adaptive_avg_pool2d",
        "flatten",
        "member_linear",
    ]


def test_in_bfloat16_widths_are_multiples_of_eight_and_weights_are_cast() -> None:
    (one,), told = compiled([member(5), member(6, seed=1)], bfloat16=True)
    assert told == []
    assert one.shapes["0.weight"] == (8, 3, 3, 3)
    cast = {one.program.names[placeholder] for placeholder in one.bfloat16}
    assert cast == {"0.weight", "4.weight", "7.weight", "7.bias"}


def test_filters_that_are_buffers_are_not_cast() -> None:
    """A buffer of the stack goes back to its network, which would be left with rounded filters."""
    network = Model(lambda self, x: self.c(F.conv2d(x, self.filters, padding=1)), filters=torch.rand(8, 3, 3, 3))
    network.c = conv(8, 8)
    (one,), told = compiled([network], bfloat16=True)
    assert told == []
    assert {one.program.names[placeholder] for placeholder in one.bfloat16} == {"c.weight"}


def test_networks_that_work_in_place_on_their_inputs_share_one_program() -> None:
    """The check gave the second network the inputs that the first had changed."""
    networks = [Model(lambda self, x: self.c(x.sub_(0.5)), c=conv(3, 8)) for _ in range(2)]
    (one,), told = compiled(networks)
    assert one.numbers == (0, 1)
    assert told == []


def test_members_are_compiled_one_by_one_if_memory_is_short_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision, all of them may not fit a GPU that can train them; this ended the training."""
    tried: list[weakref.ref[Tensor]] = []
    backward = Run.backward

    def scarce(run: Run, gradient: Tensor) -> Any:
        assert all(weight() is None for weight in tried), "what an earlier check has allocated is still there"
        tried.extend(weakref.ref(weight) for weight in run.weights.values())
        if run.program.members > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return backward(run, gradient)

    monkeypatch.setattr(Run, "backward", scarce)
    gc.disable()
    try:
        programs, told = compiled([member(), member(seed=1)])
    finally:
        gc.enable()
    assert [one.numbers for one in programs] == [(0,), (1,)]
    (sentence,) = told
    assert sentence.startswith("members are computed one by one, slower: the program fails: CUDA out of memory.")


def test_networks_of_different_layers_have_programs_of_their_own() -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    programs, told = compiled([member(), other, member(seed=1)])
    assert [one.numbers for one in programs] == [(0, 2), (1,)]
    assert told == []


def test_networks_apart_have_programs_of_their_own() -> None:
    programs, _ = compiled([member(), member(seed=1)], together=False)
    assert [(one.numbers, one.program.members) for one in programs] == [((0,), 1), ((1,), 1)]


def test_widths_that_differ_too_much_are_computed_one_by_one() -> None:
    programs, told = compiled([member(4), member(64, seed=1)])
    assert [one.numbers for one in programs] == [(0,), (1,)]
    assert told == ["members are computed one by one, slower: their widths differ too much"]


class Scaling(nn.Module):
    """The same layers, another computation: only the trial tells."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 4), factor

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.factor


def test_networks_that_only_look_alike_are_computed_one_by_one() -> None:
    programs, told = compiled([Scaling(1.0), Scaling(2.0)], torch.randn(2, 6))
    assert [one.numbers for one in programs] == [(0,), (1,)]
    assert told == ["members are computed one by one, slower: the program computes another 'output' than the network"]


def test_momenta_that_differ_are_found() -> None:
    programs, told = compiled([member(), member(momentum=0.5)])
    assert len(programs) == 2
    assert "another '1.running_mean'" in told[0]


def test_dropout_rates_that_differ_are_found() -> None:
    """The trial runs without dropout, so that outputs do not tell."""
    programs, told = compiled([member(dropout=0.2), member(seed=1, dropout=0.5)])
    assert [one.numbers for one in programs] == [(0,), (1,)]
    assert "at rates [0.5], the program at [0.2]" in told[0]
    (one,), told = compiled([member(dropout=0.2), member(seed=1, dropout=0.2)])
    assert one.draws
    assert told == []


def test_dropout_of_members_of_different_widths_is_computed_one_by_one() -> None:
    """A mask has a number for each channel: padded ones would take those of others."""
    programs, told = compiled([member(8, dropout=0.2), member(7, seed=1, dropout=0.2)])
    assert len(programs) == 2
    assert "dropout draws a number for each channel" in told[0]


def functional_dropout(self: Any, x: Tensor) -> Any:
    return self.d(F.dropout(self.c(x), 0.3, self.training))


def test_functional_dropout_compiles() -> None:
    (one,), told = compiled([Model(functional_dropout, c=conv(), d=conv(4, 2))])
    assert told == []
    assert one.draws
    assert "member_dropout(member_conv, generators, 0.3)" in str(one.program)


def test_tied_weights_compile() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6, bias=False))
    network[2].weight = network[0].weight
    (one,), told = compiled([network], torch.randn(2, 6))
    assert told == []
    assert operations(str(one.program)) == ["member_linear", "relu", "member_linear"]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(se.zoo.resnet20, (3, 8, 8)), (se.zoo.resnet32, (3, 8, 8)), (se.zoo.lenet5, (1, 28, 28)), (se.zoo.mlp, (64,))],
)
def test_the_networks_of_the_zoo_compile_together(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    arguments = shape if make is se.zoo.mlp else ()
    (one,), told = compiled([make(*arguments) for _ in range(2)], torch.randn(2, *shape))
    assert told == []
    assert one.program.members == 2


def test_every_norm_of_a_resnet20_is_fused_with_its_convolution() -> None:
    printed = str(compile_network(se.zoo.resnet20(), torch.randn(2, 3, 8, 8)))
    names = operations(printed)
    assert names.count("conv_norm") == 19
    assert printed.count("relu=True") == 19
    assert names.count("subsample") == 2
    assert set(names) <= {"conv_norm", "subsample", "mean", "adaptive_avg_pool2d", "flatten", "member_linear"}


def test_views_of_convolutions_compile() -> None:
    """`x.view(x.shape[0], -1)` fails on what is stored channels last; in a program it is a reshape."""
    network = Model(lambda self, x: self.head(self.c(x).view(x.shape[0], -1)), c=conv(), head=nn.Linear(144, 3))
    assert compiled([network])[1] == []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 4), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x)


def hooked(register: str) -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 4))
    getattr(network[0], register)(lambda *arguments: None)
    return network


def hooked_parameter(register: str) -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 4))
    getattr(network[0].weight, register)(lambda *arguments: None)
    return network


def linear(forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Model(forward, layer=nn.Linear(6, 4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a forward hook": (lambda: hooked("register_forward_hook"), "the network has hooks"),
    "a pre-hook": (lambda: hooked("register_forward_pre_hook"), "the network has hooks"),
    "a backward hook": (lambda: hooked("register_full_backward_hook"), "the network has hooks"),
    "a parameter's hook": (lambda: hooked_parameter("register_hook"), "the network has hooks"),
    "a hook after accumulation": (
        lambda: hooked_parameter("register_post_accumulate_grad_hook"), "the network has hooks",
    ),
    "a counter on the host": (Counting, "the network draws random numbers, or keeps count, on the host"),
    "Python's random": (linear(lambda self, x: self.layer(x) * random.random()), "draws random numbers"),
    "NumPy's random": (
        linear(lambda self, x: self.layer(x) * float(np.random.rand())), "draws random numbers",  # noqa: NPY002
    ),
    "torch's random": (linear(lambda self, x: self.layer(x) * torch.rand(4)), "rand.* draws random numbers"),
    "dropout of features": (
        linear(lambda self, x: F.dropout2d(self.layer(x)[:, :, None, None])), "feature_dropout.* draws random numbers",
    ),
    "alpha dropout": (linear(lambda self, x: F.alpha_dropout(self.layer(x), 0.3, True)), "draws random numbers"),
    "control flow on data": (
        linear(lambda self, x: self.layer(x) if x.sum() > 0 else self.layer(-x)), "cannot be exported: Could not guard",
    ),
    "two outputs": (linear(lambda self, x: (self.layer(x), x)), "returns more than one tensor"),
    "a buffer that changes": (
        lambda: Model(lambda self, x: self.layer(x) * self.seen.mul_(2), layer=nn.Linear(6, 4), seen=torch.ones(())),
        "changes 'seen' in place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_refusal_is_told(name: str) -> None:
    make, reason = REFUSED[name]
    programs, (told,) = compiled([make()], torch.randn(2, 6))
    assert programs == []
    assert told.startswith("PyTorch's own kernels are used, slower: ")
    with pytest.raises(ProgramError, match=reason):
        raise ProgramError(told)


class StraightThrough(torch.autograd.Function):
    """The sign of x, with the gradient of x itself: export follows the forward pass only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


class Rectified(torch.autograd.Function):
    """A ReLU of one's own, with the gradient that autograd would find, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * (ctx.saved_tensors[0] > 0)


def test_gradients_of_ones_own_are_refused_where_they_differ() -> None:
    network = Model(lambda self, x: self.d(StraightThrough.apply(self.c(x))), c=conv(), d=conv(4, 2))
    programs, told = compiled([network])
    assert programs == []
    assert "the program computes another 'c.weight' than the network" in told[0]
    network = Model(lambda self, x: self.d(Rectified.apply(self.c(x))), c=conv(), d=conv(4, 2))
    assert compiled([network])[1] == []


def test_sparse_gradients_are_refused() -> None:
    programs, told = compiled([Sparse()], torch.rand(2, 1, 8, 8))
    assert programs == []
    assert "an embedding has sparse gradients" in told[0]


@pytest.mark.xfail(strict=True, reason="len(x) gives export a number: the batch becomes a constant of the program")
def test_views_by_the_length_of_the_batch_compile() -> None:
    assert compiled([Viewing(3)], torch.randn(2, 3, 8, 8))[1] == []


def test_layers_called_twice_and_never_compile() -> None:
    (one,), told = compiled([Nested()], torch.randn(2, 3, 8, 8))
    assert told == []
    assert operations(str(one.program)).count("member_linear") == 3


class Wrapped(nn.Module):
    """Call a norm by its second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)
        self.wrapped = nn.Sequential(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.wrapped(self.first(x)).relu().mean((2, 3)))
        return result


@pytest.mark.parametrize("make", [partial(Renamed, twice=False), Wrapped])
def test_layers_under_two_names_compile(make: Callable[[], nn.Module]) -> None:
    """Their statistics are updated under both names, as the check finds."""
    torch.manual_seed(0)
    (one,), told = compiled([make(), make()], torch.randn(2, 3, 12, 12))
    assert told == []
    assert not any(name.startswith(("features", "wrapped")) for name in one.program.names.values())


def test_compiling_leaves_networks_and_random_states_alone() -> None:
    networks = [
        Counting(),
        member(dropout=0.3),
        Model(lambda self, x: self.c(x) * random.random(), c=conv()),
        nn.utils.parametrizations.spectral_norm(conv()),  # to read its weight is a power iteration
    ]
    before = [{name: tensor.clone() for name, tensor in network.state_dict().items()} for network in networks]
    states = random.getstate(), torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    for network in networks:
        compiled([network], torch.randn(2, 6, generator=torch.Generator()) if network is networks[0] else None)
    assert networks[0].calls == 0
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert str(np.random.get_state()) == states[2]  # noqa: NPY002
    for network, tensors in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in network.state_dict().items())
        assert all(parameter.grad is None for parameter in network.parameters())


def forgets_the_relu(program: Program) -> Program:
    result = program.copy()
    for node in result.graph.nodes:
        if node.target is member_norm:
            node.kwargs = {**node.kwargs, "relu": False}
    return result


def forgets_momentum(program: Program) -> Program:
    result = program.copy()
    for node in result.graph.nodes:
        if node.target is member_norm:
            node.kwargs = {**node.kwargs, "momentum": 0.5}
    return result


def detaches(program: Program) -> Program:
    """Leave outputs and statistics as they are, and stop the gradients."""
    result = program.copy()
    (first,) = (node for node in result.graph.nodes if node.target is member_norm)
    with result.graph.inserting_after(first):
        stopped = result.graph.call_function(torch.ops.aten.detach.default, (first,))
    stopped.meta = dict(first.meta)
    first.replace_all_uses_with(stopped, delete_user_cb=lambda user: user is not stopped)
    return result


def adds_a_dimension(program: Program) -> Program:
    """Return the output as (1, samples, …), which broadcasts to what the network returns."""
    result = program.copy()
    last = result.output
    with result.graph.inserting_after(last):
        wider = result.graph.call_function(torch.ops.aten.unsqueeze.default, (last, 0))
    wider.meta = dict(last.meta)
    last.replace_all_uses_with(wider, delete_user_cb=lambda user: user is not wider)
    return result


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (forgets_the_relu, "output"),
        (adds_a_dimension, "output"),
        (forgets_momentum, "1.running_mean"),
        (detaches, "0.weight"),
    ],
)
def test_a_wrong_pass_is_found(wrong: Callable[[Program], Program], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = compilation.fuse_norms
    monkeypatch.setattr(compilation, "fuse_norms", lambda program: wrong(fuse(program)))
    programs, (told,) = compiled([member()])
    assert programs == []
    assert told.endswith(f"the program computes another {what!r} than the network")


def test_a_pass_that_breaks_the_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "fuse_norms", lambda program: replace(program, names={}))
    programs, (told,) = compiled([member()])
    assert programs == []
    assert "the program fails" in told


def test_hooks_of_all_modules_count_too() -> None:
    network = nn.Sequential(nn.BatchNorm2d(8))
    assert not has_hooks(network)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert has_hooks(network)
    finally:
        handle.remove()
    assert not has_hooks(network)
