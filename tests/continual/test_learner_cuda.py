"""Continual learning on a GPU, where a step is a CUDA graph: the same guarantee, losses and files as on a CPU."""

from pathlib import Path

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS, StructuredLearner
from tests.support.continual_cases import SHORT, inputs_of, learn_and_check, make_backbone, make_tasks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:task . gets no neuron"),
]
TASKS = make_tasks()


@pytest.mark.parametrize("backbone", ["plain", "residual"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_earlier_logits_stay_bit_identical_on_a_gpu(backbone: str, optimizer: str) -> None:
    """A step that cannot be captured is logged, which is an error, see conftest.py."""
    learner = StructuredLearner(
        make_backbone(backbone), search_epochs=1, optimizer=optimizer, weight_decay=0.01, device="cuda", **SHORT
    )
    learn_and_check(learner, TASKS)


@pytest.mark.parametrize("method", ["structured", "supsup"])
def test_half_vgg11_trains_in_cuda_graphs(method: str) -> None:
    """Two tasks of colour images, so that the second meets leftovers of the first task's graphs."""
    pixels = torch.randint(0, 256, (1200, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(1200) % 4
    data = se.Data.from_arrays(pixels, labels, test=(pixels[:600], labels[:600]))
    arguments = {"search_epochs": 1} if method == "structured" else {}
    learner = LEARNERS[method](se.zoo.half_vgg11_backbone(), epochs=2, quiet=True, device="cuda", **arguments)
    for task in se.continual.split_tasks(data, 2):
        learner.learn(task)
        many = pixels.repeat(3, 1, 1, 1)
        eager, graphs = (learner.logits(many, task.number, batch_size=size) for size in (len(many), 512))
        torch.testing.assert_close(eager, graphs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("method", LEARNERS)
def test_gpu_learner_matches_the_cpu_learner(method: str, tmp_path: Path, without_tf32: None) -> None:
    settings = {**SHORT, "optimizer": "sgd", "rate": 0.01} | ({"selection": "random"} if method == "structured" else {})
    on_gpu, on_cpu = (LEARNERS[method](make_backbone(), device=device, **settings) for device in ("cuda", "cpu"))
    for learner in (on_gpu, on_cpu):
        learner.learn(TASKS[0])
    assert on_gpu.learned[0].losses == pytest.approx(on_cpu.learned[0].losses, rel=1e-3)
    x = inputs_of(TASKS[0])
    torch.testing.assert_close(on_gpu.logits(x, 0), on_cpu.logits(x, 0), atol=1e-3, rtol=1e-2)
    on_gpu.save(tmp_path / "learner.safetensors")
    loaded = LEARNERS[method].load(tmp_path / "learner.safetensors", backbone=make_backbone(), device="cpu")
    torch.testing.assert_close(loaded.logits(x, 0), on_gpu.logits(x, 0), atol=1e-4, rtol=1e-4)


def test_same_seed_gives_the_same_logits_on_a_gpu() -> None:
    """With dropout in the head."""
    logits = []
    for _ in range(2):
        learner = StructuredLearner(make_backbone(), search_epochs=1, head="paper", device="cuda", **SHORT)
        logits.append(learn_and_check(learner, TASKS[:2]))
    assert all(torch.equal(logits[0][number], logits[1][number]) for number in (0, 1))
