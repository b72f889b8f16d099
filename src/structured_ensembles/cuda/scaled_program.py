"""ScaledProgram: the training pass of a frozen network whose outputs members scale, differentiable in their factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, call, map_inputs, tensors_in
from structured_ensembles.common.member_rows import scale_rows
from structured_ensembles.cuda.capture import CaptureError, host_state
from structured_ensembles.cuda.compilation import castable_placeholders, compile_scaled
from structured_ensembles.cuda.launch import compile_only
from structured_ensembles.cuda.program import Program, ProgramError
from structured_ensembles.cuda.program_check import WithoutDropout, are_close
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from structured_ensembles.data.random_states import preserve_random_states
from structured_ensembles.networks.copying import clone_model

Factors = Mapping[str, Tensor]  # by scaled layer, (members, channels)


class ScaledProgram:
    """A frozen network as a program. Rows of a batch are grouped by member; all members share weights and batch norms.

    Dropout draws from the device's generator, as the network does.
    program: of this network, see `compile_scaled`. bfloat16: whether passes compute in it. double: all in double
    precision and without dropout, as programs are checked.
    """

    def __init__(self, program: Program, network: nn.Module, *, bfloat16: bool, double: bool = False) -> None:
        self.program, self.bfloat16 = program, bfloat16
        cast = castable_placeholders(program, network) if bfloat16 else ()
        self.stack = Stack(program, [network], {}, cast, double=double)
        buffers = dict(network.named_buffers(remove_duplicate=False))
        self._counters = [buffers[name] for name in program.counters]
        self._device = next(network.parameters()).device
        self._drops = not double

    def __call__(self, inputs: Inputs, factors: Factors) -> Tensor:
        """Return the output for rows grouped by member, in the type of the factors."""
        if self._counters:
            torch._foreach_add_(self._counters, 1)
        outputs: Tensor = _Pass.apply(self, tensors_in(inputs), *self._in_order(factors))
        return outputs

    def compile_kernels(self, inputs: Inputs, factors: Factors) -> None:
        """Compile the kernels of a pass in parallel, before the first. Raises `CaptureError` if that fails."""
        try:
            with compile_only() as possible, torch.no_grad(), self.autocast():
                if possible:
                    run, outputs = self.start(tensors_in(inputs), self._in_order(factors), drop=False)
                    run.backward(torch.zeros_like(outputs))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton needs a C compiler, and some kernels more than a GPU has
            raise CaptureError(first_line(error)) from error
        self.load_statistics()  # norms without a kernel of ours have seen zeros

    @torch.no_grad()
    def load_statistics(self) -> None:
        """Copy the network's buffers into the program's, before an epoch."""
        self.stack.load_statistics()

    @torch.no_grad()
    def store_statistics(self) -> None:
        """Copy the program's buffers to the network, after an epoch."""
        self.stack.store_statistics()

    def tensors(self) -> list[Tensor]:
        """List all tensors that a pass changes."""
        return [*self.stack.tensors(), *self._counters]

    def start(self, inputs: Sequence[Tensor], factors: Sequence[Tensor], *, drop: bool) -> tuple[Run, Tensor]:
        """Compute the output, with dropout or without; returns the run, too, which can go backward."""
        by_placeholder = dict(zip(self.program.factors, factors, strict=True))
        generators = [None] if drop else None
        run = Run(self.program, {**self.stack.weights, **by_placeholder}, set(by_placeholder), generators)
        return run, run.forward(inputs)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of passes; one that does nothing unless they are in bfloat16."""
        if not self.bfloat16:
            return nullcontext()
        # Without the cache of cast weights: a CUDA graph would keep those of the step that was captured.
        return torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False)

    def _in_order(self, factors: Factors) -> list[Tensor]:
        """Return the factors in the order of their placeholders."""
        return [factors[layer] for layer in self.program.factors.values()]


class _Pass(torch.autograd.Function):
    """A pass through a program as one function for autograd."""

    @staticmethod
    def forward(ctx: Any, program: ScaledProgram, inputs: Sequence[Tensor], *factors: Tensor) -> Tensor:
        with program.autocast():
            ctx.run, outputs = program.start(inputs, factors, drop=program._drops)
        ctx.program, ctx.dtype = program, outputs.dtype
        return outputs.to(factors[0].dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.program.autocast():
            gradients = ctx.run.backward(gradient.to(ctx.dtype))
        return None, None, *(gradients.get(placeholder) for placeholder in ctx.program.program.factors)


def compile_and_check(
    network: nn.Module, layers: Mapping[str, int], example: Inputs, factors: Factors, rows: Sequence[int] = ()
) -> ScaledProgram:
    """Compile a frozen network for passes in bfloat16, after a check in double precision.

    A program must compute the outputs, gradients of the factors and statistics of the network whose hooks scale the
    outputs. Raises `ProgramError` if it does not, or cannot be made; on a GPU also `CaptureError` if its kernels
    cannot be compiled. example: some samples. factors: to check with. rows: of the batches, for their kernels.
    """
    with preserve_random_states():  # a network may draw from them, in export and in trials
        try:
            program = compile_scaled(network, layers, example)
            _check(program, network, layers, example, factors)
            scaled = ScaledProgram(program, network, bfloat16=True)
            if next(network.parameters()).is_cuda:
                for count in rows:
                    scaled.compile_kernels(_repeat_first(example, count), factors)
            return scaled
        except (ProgramError, CaptureError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ProgramError(f"the program fails: {first_line(error)}") from error


def _repeat_first(example: Inputs, rows: int) -> Inputs:
    """Return a batch of so many rows, all like the first sample."""
    return map_inputs(lambda x: x[:1].expand(rows, *x.shape[1:]).contiguous(), example)


def _check(program: Program, network: nn.Module, layers: Mapping[str, int], example: Inputs, factors: Factors) -> None:
    """Compare a program with a network with hooks, both in double precision; raise `ProgramError` if they differ."""
    members = len(next(iter(factors.values())))
    rows = map_inputs(lambda x: _in_double(torch.cat([x] * members)), example)
    leaves = {layer: factor.detach().double().requires_grad_() for layer, factor in factors.items()}
    of_program, of_hooks = (clone_model(network).double().train() for _ in range(2))
    run = ScaledProgram(program, of_program, bfloat16=False, double=True)
    for layer, dim in layers.items():
        of_hooks.get_submodule(layer).register_forward_hook(_scaling_hook(leaves[layer], dim))
    before = host_state([of_hooks])
    with torch.enable_grad():
        with WithoutDropout() as without:
            outputs = [run(rows, leaves), call(of_hooks, rows)]
        gradients = [torch.autograd.grad(y.square().sum(), list(leaves.values()), allow_unused=True) for y in outputs]
    without.check_rates(program)
    if host_state([of_hooks]) != before:
        raise ProgramError("the network draws random numbers, or keeps count, on the host")
    run.store_statistics()
    compared = [("output", *outputs)]
    compared += zip((f"gradient of {layer}" for layer in leaves), *gradients, strict=True)
    compared += [
        (name, of_program.get_buffer(name), of_hooks.get_buffer(name)) for name, _ in of_program.named_buffers()
    ]
    for name, actual, expected in compared:
        if not _agree(actual, expected):
            raise ProgramError(f"the program computes another {name!r} than the network")


def _scaling_hook(factors: Tensor, dim: int) -> Callable[..., Tensor]:
    """Return a forward hook that scales a layer's output."""
    return lambda _layer, _inputs, result: scale_rows(result, factors, dim)


def _in_double(x: Tensor) -> Tensor:
    """Return floats in double precision, whole numbers as they are."""
    return x.double() if x.is_floating_point() else x


def _agree(of_program: Tensor | None, of_network: Tensor | None) -> bool:
    """Tell whether two tensors are equal but for rounding; None is a gradient of zeros."""
    if of_program is None or of_network is None:
        rest = of_program if of_network is None else of_network
        return rest is None or not rest.any()
    return are_close(of_network, of_program)
