"""Programs run forward and backward as the networks do: by autograd, and by our kernels in Triton's interpreter."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda import batch_norm, convolution, running
from structured_ensembles.cuda.compilation import compile_network
from structured_ensembles.cuda.passes import stack_members
from structured_ensembles.cuda.program import Program
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from tests.support.kernel_checks import here, recorded_launches
from tests.support.programs import (
    Model,
    assert_equal,
    conv,
    images,
    norm,
    output_gradient,
    results_of,
    results_of_network,
)


def check(network: nn.Module, example: Any) -> Program:
    program = compile_network(network, example)
    assert_equal(results_of(program, [network], [example])[0], results_of_network(network, example, program.counters))
    return program


def split_unevenly(y: Tensor) -> Tensor:
    first, second = y.split([1, 3], dim=1)
    return first * second


FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "chunks": lambda self, x: torch.mul(*self.c(x).chunk(2, 1)),
    "one chunk": lambda self, x: self.c(x).chunk(2, 1)[1],
    "split": lambda self, x: split_unevenly(self.c(x)),
    "a maximum with indices": lambda self, x: self.c(x).max(1)[0],
    "indices that are read, too": lambda self, x: (m := self.c(x).max(1))[0] * m[1].float(),
    "indices alone": lambda self, x: self.d(self.c(x)) * self.c(x).max(1)[1].unsqueeze(1).float(),
    "sorted": lambda self, x: self.c(x).sort(1)[0] * 2,
    "an item read twice": lambda self, x: (a := self.c(x).chunk(2, 1)[0]) * a + a,
    "a residual sum": lambda self, x: (y := self.c(x).relu()) + self.d(y),
    "read by three": lambda self, x: (y := self.c(x)) * y.relu() + self.d(y),
    "an unused result": lambda self, x: (self.d(y := self.c(x)), y)[1],
    "detached": lambda self, x: self.d(self.c(x)) * self.c(x).detach(),
    "only detached": lambda self, x: self.d(self.c(x).detach()),
    "the input alone": lambda self, x: self.c(x) * x.mean(1, keepdim=True),
    "a parameter": lambda self, x: self.c(x) * self.scale + self.scale,
    "a parameter with itself": lambda self, x: self.c(x) * torch.dot(self.vector_scale, self.vector_scale),
    "constants": lambda self, x: self.c(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None] + torch.ones(4, 1, 1),
    "sizes": lambda self, x: self.c(x).reshape(x.shape[0], -1) / x.shape[0],
    "a vector norm": lambda self, x: self.vector(self.c(x).mean((2, 3))),
    "a norm read twice": lambda self, x: (y := self.n(self.c(x)).relu()) * self.d(y),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_program_computes_what_the_network_does(name: str) -> None:
    parts = {"c": conv(), "d": conv(4, 4), "n": norm(), "vector": nn.BatchNorm1d(4)}
    parts["vector_scale"] = nn.Parameter(torch.rand(4))  # type: ignore[assignment]
    check(Model(FORWARDS[name], **parts, scale=nn.Parameter(torch.rand(4, 1, 1))), images(3))


def test_frozen_layers_have_no_gradients() -> None:
    network = nn.Sequential(conv(), norm(), nn.ReLU(), conv(4, 4, bias=True), norm(), conv(4, 2))
    for layer in (network[0], network[1], network[4]):
        layer.requires_grad_(False)
    program = check(network, images())
    gradients = results_of(program, [network], [images()])[0]
    assert {name for name in gradients if name.endswith("grad")} == {"3.weight.grad", "3.bias.grad", "5.weight.grad"}


def test_a_frozen_network_has_no_gradients_at_all() -> None:
    network = nn.Sequential(conv(), norm()).requires_grad_(False)
    program = compile_network(network, images())
    stack = Stack(program, [network], {})
    run = Run(program, stack.weights, stack.learned, None)
    run.forward([images()])
    assert not run.tape.records
    assert run.backward(torch.ones(2, 4, 6, 6)) == {}


def test_embeddings_of_ids() -> None:
    network = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 4))
    check(network, torch.tensor([[1, 2, 3], [3, 8, 0]]))


class Block(nn.Module):
    """Convolutions read by one or two, sums of norms, a shortcut that subsamples, 1 × 1 and strided windows."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv(3, 6), conv(6, 10, stride=2), conv(10, 10)
        self.c, self.d = nn.Conv2d(10, 6, 1, bias=bias), conv(6, 6)
        self.norms = nn.ModuleList([norm(6), norm(10), norm(10), norm(6), norm(6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norms[0](self.stem(x)).relu()
        y = self.norms[1](self.a(x)).relu()
        shortcut = F.pad(F.avg_pool2d(x, 1, 2), (0, 0, 0, 0, 0, 4))
        y = (self.norms[2](self.b(y)) + shortcut).relu()
        z = self.norms[3](self.c(y))
        z = self.norms[4](self.d(z) * 2) + z  # a norm whose convolution is scaled in between
        return self.head(z.mean((2, 3)))


def stacked(networks: list[nn.Module], example: Tensor) -> tuple[Program, Stack, Run]:
    program = stack_members(compile_network(networks[0], example), len(networks))
    stack = Stack(program, networks, {})
    return program, stack, Run(program, stack.weights, stack.learned, None)


@pytest.fixture
def our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs run on our kernels, in float32 by Triton's interpreter."""
    monkeypatch.setattr(convolution, "fits", lambda x, weight, window: True)
    monkeypatch.setattr(batch_norm, "fits", lambda x, members: x.dim() == 4)


@here
@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("bias", [False, True])
def test_our_kernels_compute_what_two_networks_do(bias: bool) -> None:
    networks: list[nn.Module] = [Block(bias), Block(bias)]
    example = images(4, size=7)
    expected = [results_of_network(network, batch) for network, batch in zip(networks, example.chunk(2), strict=True)]
    program, stack, run = stacked(networks, images(2, size=7))
    with recorded_launches() as names:
        outputs = run.forward([example])
        gradients = run.backward(torch.cat([output_gradient(output) for output in outputs.chunk(2)]))
    assert {"convolve_by_sweep", "convolve_by_rows", "convolve_back_strided", "subsample", "normalize"} <= set(names)
    for number, reference in enumerate(expected):
        torch.testing.assert_close(outputs.chunk(2)[number].double(), reference["output"], rtol=1e-4, atol=1e-4)
        actual = {f"{program.names[placeholder]}.grad": value[number] for placeholder, value in gradients.items()}
        actual |= {program.names[name]: value[number] for name, value in stack.weights.items() if "running" in name}
        for name, value in actual.items():
            scale = float(reference[name].abs().max())
            torch.testing.assert_close(value.double(), reference[name], rtol=1e-3, atol=1e-4 * (scale + 1))
        assert actual.keys() == reference.keys() - {"output"} - set(program.counters)


@here
@pytest.mark.usefixtures("our_kernels")
def test_norms_behind_convolutions_take_two_kernels_less() -> None:
    """The convolution leaves moments, the next one's gradient leaves sums: neither is a kernel of its own."""
    network = nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), conv(8, 8), norm(8), nn.ReLU(), conv(8, 8))
    _, _, run = stacked([network], images())
    with recorded_launches() as names:
        outputs = run.forward([images()])
        assert names == ["convolve_by_sweep", "normalize"] * 2 + ["convolve_by_sweep"]
        names.clear()
        run.backward(torch.ones_like(outputs))
    weights = ["weight_products_by_sweep"]  # of so few pixels that they are one block, and nothing is merged
    assert names == [*weights, "convolve_by_sweep", "input_gradient"] * 2 + weights


# What reaches a convolution is stored channels last, but with gaps or in another order: kernels know of neither.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the second half of the channels": lambda y: y.chunk(2, 1)[1],
    "every second pixel": lambda y: y[:, :4, ::2, ::2],
    "without the border": lambda y: y[:, :4, 1:, :-1],
    "turned": lambda y: y[:, 4:].transpose(2, 3),
    "contiguous": lambda y: y[:, 2:6].contiguous(),
    "broadcast": lambda y: y[:, :1].expand(-1, 4, -1, -1),
}


@here
@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize("name", PARTS)
def test_our_kernels_on_parts_of_an_activation(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.n(self.d(PARTS[name](self.c(x)))) + self.e(PARTS[name](self.c(x) * 2))

    network = Model(forward, c=conv(3, 8), d=conv(4, 6), e=conv(4, 6), n=norm(6))
    program, stack, run = stacked([network], images(2, size=7))
    reference = results_of_network(network, images(2, size=7), program.counters)
    outputs = run.forward([images(2, size=7)])
    gradients = run.backward(output_gradient(outputs))
    torch.testing.assert_close(outputs.double(), reference["output"], rtol=1e-4, atol=1e-4)
    assert len(gradients) == 5
    for placeholder, stacked_gradient in gradients.items():
        wanted = reference[f"{program.names[placeholder]}.grad"]
        scale = float(wanted.abs().max())
        torch.testing.assert_close(stacked_gradient[0].double(), wanted, rtol=1e-3, atol=1e-4 * (scale + 1))
    assert len(stack.learned) == 5


class SideStream:
    """A stream whose work is done only when another stream waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def wait_stream(self, _other: object) -> None: ...

    def record_event(self) -> list[Callable[[], object]]:
        work, self.work = self.work, []
        return work


class MainStream:
    def wait_event(self, event: list[Callable[[], object]]) -> None:
        for work in event:
            work()


@here
@pytest.mark.usefixtures("our_kernels")
def test_gradients_of_a_shared_weight_are_summed_only_when_the_side_stream_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, compute = SideStream(), running.weight_gradient

    def compute_later(*arguments: Any) -> Tensor:
        gradient = compute(*arguments)
        result = torch.full_like(gradient, torch.nan)
        side.work.append(lambda: result.copy_(gradient))
        return result

    monkeypatch.setattr(running, "weight_gradient", compute_later)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: MainStream())
    network = Model(lambda self, x: self.c(self.c(self.c(x)).relu()), c=conv(3, 3))
    program, stack, _ = stacked([network], images())
    run = Run(program, stack.weights, stack.learned, None, side)  # type: ignore[arg-type]
    outputs = run.forward([images()])
    (gradient,) = run.backward(output_gradient(outputs)).values()
    expected = results_of_network(network, images())["c.weight.grad"]
    torch.testing.assert_close(gradient[0].double(), expected, rtol=1e-4, atol=1e-4)


@here
@pytest.mark.usefixtures("our_kernels")
def test_a_gradient_of_another_type_reaches_a_convolution_in_that_of_its_weights() -> None:
    """A batch norm of float32 activations adds the outputs of a convolution in half precision."""
    network = Model(lambda self, x: self.n(self.d(x)) + self.c(x), c=conv(), d=conv(), n=norm())
    program, stack, _ = stacked([network], images())
    (name,) = [placeholder for placeholder, name in program.names.items() if name == "c.weight"]
    weights = {**stack.weights, name: stack.weights[name].half()}
    run = Run(program, weights, stack.learned, None)
    outputs = run.forward([images()])
    gradients = run.backward(output_gradient(outputs))
    expected = results_of_network(network, images(), program.counters)
    for placeholder, gradient in gradients.items():
        wanted = expected[f"{program.names[placeholder]}.grad"]
        torch.testing.assert_close(gradient[0].double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
    assert len(gradients) == 4


@here
@pytest.mark.usefixtures("our_kernels")
def test_frozen_norms_keep_no_activations() -> None:
    network = nn.Sequential(conv(), norm(), nn.ReLU(), conv(4, 4), norm(), conv(4, 4)).requires_grad_(False)
    network[5].requires_grad_(True)
    _, _, run = stacked([network], images())
    outputs = run.forward([images()])
    assert not run.norms
    assert len(run.tape.records) == 1
    assert len(run.backward(torch.ones_like(outputs))) == 1


@here
@pytest.mark.usefixtures("our_kernels")
def test_a_norm_that_no_gradient_reaches_keeps_no_activations() -> None:
    network = Model(lambda self, x: self.d(self.n(self.c(x)).detach()), c=conv(), n=norm(), d=conv(4, 4))
    _, _, run = stacked([network], images())
    assert len(run.backward(torch.ones_like(run.forward([images()])))) == 1
    assert not run.norms


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.n, self.d = conv(), norm(), conv(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.n(self.c(x)).relu()
        return y + self.d(torch.cat(y.chunk(2, 1), 1))


def test_nothing_is_kept_after_a_backward_pass() -> None:
    program, _, run = stacked([Watched()], images())
    outputs = run.forward([images()])
    assert run.tape.records
    run.backward(torch.ones_like(outputs))
    assert not run.tape.records
    assert not run.tape.gradients
    assert not run.values
    assert not run.tape.ready
    assert not run.norms
    assert program.output not in run.values


@here
@pytest.mark.usefixtures("our_kernels")
def test_nothing_is_kept_after_a_backward_pass_of_our_kernels() -> None:
    _, _, run = stacked([Watched()], images())
    run.backward(torch.ones_like(run.forward([images()])))
    assert not run.tape.records
    assert not run.tape.gradients
    assert not run.tape.ready
    assert not run.norms


def test_values_go_with_their_last_reader() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(x: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in seen))
        result = x * 2
        seen.append(weakref.ref(result))
        return result

    network = Model(lambda self, x: x.exp().exp().exp().exp())
    program = compile_network(network, images())
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.target = watched
    run = Run(program, {}, set(), None)
    run.forward([images()])
    assert max(alive) <= 1


def test_a_run_goes_with_its_last_reference() -> None:
    _, _, run = stacked([Watched()], images())
    run.backward(torch.ones_like(run.forward([images()])))
    watched = weakref.ref(run)
    del run
    assert watched() is None
