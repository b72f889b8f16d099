"""Kernels are launched, or only compiled; then their outputs are zeros."""

from typing import Any

import pytest
import torch

from structured_ensembles.cuda.launch import compile_only, dependent_launches, empty, launch
from tests.support.kernel_checks import here


class Kernel:
    """Note how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self.calls.append(("launch", grid, arguments, constants))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> None:
        self.calls.append(("compile", grid, arguments, constants))


@here
def test_kernels_are_compiled_within_compile_only_and_launched_outside() -> None:
    kernel = Kernel()
    launch(kernel, (2, 3), 1, WIDE=4)
    with compile_only() as possible:
        launch(kernel, (2, 3), 1, WIDE=4)
    launch(kernel, (2, 3), 1, WIDE=4)
    within = "compile" if possible else "launch"
    assert kernel.calls == [(how, (2, 3), (1,), {"WIDE": 4}) for how in ("launch", within, "launch")]


@pytest.mark.parametrize(("hip", "expected"), [(None, {"WIDE": 4, "maxnreg": 128}), ("6.2", {"WIDE": 4})])
def test_registers_are_limited_on_gpus_of_nvidia_only(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: dict[str, int]
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    kernel = Kernel()
    launch(kernel, (2, 3), WIDE=4, maxnreg=128)
    assert kernel.calls == [("launch", (2, 3), (), expected)]


@here
def test_kernels_are_told_that_they_may_start_early() -> None:
    kernel = Kernel()
    with dependent_launches():
        launch(kernel, (1,), WIDE=4)
    launch(kernel, (1,), WIDE=4)
    assert [constants for *_, constants in kernel.calls] == [
        {"WIDE": 4, "DEPENDENT": True, "launch_pdl": True},
        {"WIDE": 4},
    ]


@here
def test_an_error_ends_compile_only() -> None:
    kernel = Kernel()
    with pytest.raises(ValueError, match="broken"), compile_only():
        raise ValueError("broken")
    launch(kernel, (1,))
    assert kernel.calls[0][0] == "launch"


@here
def test_outputs_have_the_type_and_layout_that_are_asked_for() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    assert empty(2, 3, like=like).dtype == torch.float32
    made = empty(2, 3, 4, 5, like=like, dtype=torch.float16, channels_last=True)
    assert made.shape == (2, 3, 4, 5)
    assert made.dtype == torch.float16
    assert made.is_contiguous(memory_format=torch.channels_last)
    with compile_only() as possible:
        if possible:
            assert empty(1000, like=like).count_nonzero() == 0
