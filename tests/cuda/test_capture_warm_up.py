"""Before a step is captured it runs twice, which leaves all as it was; on a CPU that stands in for the GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.cuda import capture
from structured_ensembles.cuda.capture import CaptureError, all_captured

GPU = torch.device("cuda", 0)


class Stream:
    def wait_stream(self, _other: object) -> None: ...


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Let captures run without a GPU, and return the generator that is the device's."""
    generator = torch.Generator().manual_seed(3)
    modes = ["default"]
    replacements: dict[str, Callable[..., Any]] = {
        "device": lambda _device: nullcontext(),
        "stream": lambda _stream: nullcontext(),
        "current_stream": lambda _device: Stream(),
        "synchronize": lambda _device: None,
        "graph_pool_handle": lambda: None,
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": modes.append,
        "get_rng_state": lambda _device: generator.get_state(),
        "set_rng_state": lambda state, _device: generator.set_state(state),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(capture, "_stream", lambda _device, _number: Stream())
    monkeypatch.setattr(capture, "_drop_workspaces", lambda: None)
    monkeypatch.setattr(capture, "_capture", lambda step, *_: step)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    return generator


def test_a_warm_up_restores_tensors_and_the_generator(generator: torch.Generator) -> None:
    weight, momenta, runs = torch.ones(3), [], []

    def step() -> None:
        runs.append(1)
        momenta.append(torch.ones(3)) if not momenta else momenta[0].add_(1)
        weight.add_(torch.rand(3, generator=generator))

    before = generator.get_state()
    (replay,) = all_captured([step], GPU, lambda: [weight, *momenta])
    assert len(runs) == 2
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(momenta[0], torch.zeros(3))  # it was made by the first run
    assert torch.equal(generator.get_state(), before)
    replay()
    assert torch.equal(weight, 1 + torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_a_step_that_fails_leaves_tensors_and_the_generator_as_they_were(generator: torch.Generator) -> None:
    weight = torch.ones(3)

    def step() -> None:
        weight.add_(torch.rand(3, generator=generator))
        raise RuntimeError("out of resources\nand more")

    before = generator.get_state()
    with pytest.raises(CaptureError, match=r"^out of resources$"):
        all_captured([step], GPU, lambda: [weight])
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(generator.get_state(), before)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.noted, self.weight = 0, [0], torch.zeros(2)

    def forward(self) -> None:
        self.count += 1


def note(module: Counting) -> None:
    module.noted.append(1)


def replace_weight(module: Counting) -> None:
    module.weight = torch.ones(2)


def draw(_module: Counting) -> Tensor:
    return torch.rand(1)


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Counting.forward, "keeps count"),
        (note, "keeps count"),
        (draw, "draws random numbers"),
        (replace_weight, "replaces tensors"),
    ],
)
def test_what_a_graph_could_not_repeat_is_refused(step: Callable[[Counting], object], message: str) -> None:
    module = Counting()
    kept = [module.weight]  # so that no new tensor gets its id

    def run() -> None:
        step(module)
        kept.append(module.weight)

    with pytest.raises(CaptureError, match=message):
        all_captured([run], GPU, lambda: [module.weight], modules=[module])
