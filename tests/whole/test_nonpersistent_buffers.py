"""Non-persistent buffers are saved and restored, though a state dict leaves them out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS, Learner
from structured_ensembles.continual.storage import FORMAT
from structured_ensembles.networks.state import all_tensors, fill, saved_tensors
from structured_ensembles.storage.container import read_container, write_container
from structured_ensembles.training.checkpoint import check_complete
from structured_ensembles.training.state_copies import copy_state, restore_state, update_copy
from tests.support.continual_cases import SHORT, inputs_of, make_tasks
from tests.support.engines import Stopped, change_validation, stop_after_checkpoint


class Centred(nn.Module):
    """Subtract a mean that is learned in training, and count the steps."""

    mean: Tensor
    steps: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 2, 3)), 0.5)
                self.steps += 1
        return x - self.mean.view(1, -1, 1, 1)


def backbone(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 6, 3), nn.ReLU(), Centred(6), nn.Conv2d(6, 8, 3), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("method", LEARNERS)
def test_learner_file_gives_bit_identical_logits(method: str, tmp_path: Path) -> None:
    tasks = make_tasks(tasks=2)
    learner = LEARNERS[method](backbone(), **SHORT)
    for task in tasks:
        learner.learn(task)
    assert method in ("single", "supsup", "batch-ensemble") or bool(learner.backbone[2].mean.any())
    learner.save(tmp_path / "file")
    loaded = Learner.load(tmp_path / "file", backbone=backbone(seed=1))
    for task in tasks:
        x = inputs_of(task)
        assert torch.equal(loaded.logits(x, task.number), learner.logits(x, task.number))
    for name, tensor in all_tensors(learner.backbone).items():
        assert torch.equal(all_tensors(loaded.backbone)[name], tensor), name


def test_learner_file_without_nonpersistent_buffers_warns(tmp_path: Path) -> None:
    learner = LEARNERS["naive"](backbone(), **SHORT)
    learner.learn(make_tasks(tasks=1)[0])
    learner.save(tmp_path / "new")
    structure, tensors = read_container(tmp_path / "new", FORMAT, 3, "a learner")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("backbone.2.")}
    write_container(tmp_path / "old", FORMAT, 1, structure, kept)
    with pytest.warns(UserWarning, match=r"did not keep the non-persistent buffers 2\.mean, 2\.steps"):
        loaded = Learner.load(tmp_path / "old", backbone=backbone())
    assert torch.equal(loaded.backbone[0].weight, learner.backbone[0].weight)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(backbone(seed), nn.Linear(8, 3))


def pictures() -> se.Data:
    torch.manual_seed(0)
    x, y = torch.rand(60, 1, 7, 7), torch.arange(60) % 3
    return se.Data.from_arrays(x + 0.2 * y.view(-1, 1, 1, 1), y, seed=0)


RECIPE = se.Recipe(epochs=3, batch_size=8, rate=0.05)


def trained(recipe: se.Recipe, checkpoint: Path | None = None) -> se.Ensemble:
    ensemble = se.Ensemble([network(0), network(1)])
    se.train(ensemble, pictures(), recipe, checkpoint=checkpoint, device="cpu", quiet=True)
    return ensemble


def test_best_epoch_is_restored_with_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epoch is made the best; its buffers are those of one epoch alone."""
    change_validation(monkeypatch, lambda member, result: (result[0], 1.0 if member.best_epoch < 0 else 0.0))
    schedule = {"schedule": "constant", "warmup": 0.0}
    first = trained(se.Recipe(epochs=1, batch_size=8, rate=0.05, **schedule))
    best = trained(se.Recipe(epochs=3, batch_size=8, rate=0.05, **schedule))
    for name, tensor in all_tensors(first).items():
        assert torch.equal(all_tensors(best)[name], tensor), name


def test_resumed_run_ends_with_equal_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(RECIPE)
    path = tmp_path / "checkpoint"
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch)
        with pytest.raises(Stopped):
            trained(RECIPE, path)
    resumed = trained(RECIPE, path)
    for name, tensor in all_tensors(whole).items():
        assert torch.equal(all_tensors(resumed)[name], tensor), name


def test_checkpoint_without_nonpersistent_buffers_is_refused() -> None:
    network = backbone()
    check_complete(network, saved_tensors(network), earlier_version=False)
    with pytest.raises(ValueError, match=r"an earlier version wrote it, without the non-persistent buffer 2\.mean"):
        check_complete(network, saved_tensors(network), earlier_version=True)
    plain = nn.Linear(2, 2)
    check_complete(plain, saved_tensors(plain), earlier_version=True)


def test_ensemble_file_keeps_nonpersistent_buffers(tmp_path: Path) -> None:
    ensemble = trained(RECIPE)
    ensemble.save(tmp_path / "file")
    loaded = se.Ensemble.load(tmp_path / "file", model=network(2))
    x = torch.rand(5, 1, 7, 7)
    assert torch.equal(loaded(x), ensemble(x))


def test_buffers_that_grow_or_appear_later_are_restored() -> None:
    one, other = Centred(3), Centred(3)
    for module in (one, other):
        module.register_buffer("cache", None, persistent=False)
    one.mean = torch.arange(5.0)
    one.cache = torch.ones(2)
    fill(other, all_tensors(one))
    assert torch.equal(other.mean, one.mean)
    assert torch.equal(other.cache, one.cache)
    kept = copy_state(one)  # of an earlier epoch
    one.mean, one.cache = torch.arange(7.0), None
    update_copy(kept, one)
    restore_state(other, kept)
    assert torch.equal(other.mean, torch.arange(7.0))
    assert other.cache is None
    with pytest.raises(RuntimeError, match="stranger is not in both"):
        fill(other, {"stranger": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"weight is not in both"):
        fill(nn.Linear(2, 2, bias=False), {})
