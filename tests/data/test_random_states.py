"""No public call changes the program's random states or those of a loader's generators."""

import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS, pruning, run_sequence, split_tasks
from structured_ensembles.continual.owning import OwningLearner
from structured_ensembles.data.random_states import iterate_isolated
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.grid import Job, run_grid
from tests.support.continual_cases import BACKBONES, make_tasks

GENERATOR = torch.Generator().manual_seed(5)
GIVEN = torch.Generator().manual_seed(0)
PIXELS = torch.randint(0, 256, (48, 1, 8, 8), dtype=torch.uint8, generator=GIVEN)
LABELS = torch.arange(48) % 3
RECIPE = se.Recipe(epochs=1, batch_size=16)
TWO_EPOCHS = se.Recipe(epochs=2, batch_size=16)


class Drawing(Dataset[tuple[Tensor, int]]):
    """Draw from every global generator in the transform, as augmentations do."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return (PIXELS[index] * (draws < 2)).to(torch.uint8), index % 3


def shuffled_loader() -> DataLoader[Any]:
    return DataLoader(Drawing(), batch_size=16, shuffle=True)


def loader_with_a_generator() -> DataLoader[Any]:
    return DataLoader(Drawing(), batch_size=16, shuffle=True, generator=GENERATOR)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 3)
        return nn.Sequential(*layers)


def states() -> bytes:
    return pickle.dumps(
        (
            torch.get_rng_state().tolist(),
            np.random.get_state(),  # noqa: NPY002
            random.getstate(),
            GENERATOR.get_state().tolist(),
        )
    )


@pytest.fixture(autouse=True)
def _no_gpu_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `torch.manual_seed` from seeding all GPUs, of which only the one in use is restored."""

    def refuse(_: int) -> None:
        raise AssertionError("all GPUs were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)


@contextmanager
def nothing_drawn(what: str) -> Iterator[None]:
    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert states() == before, f"{what} has changed a random state"


@pytest.mark.parametrize("source", ["arrays", "datasets", "loaders", "loaders with a generator"])
def test_data_and_ensemble_calls_restore_random_states(source: str, tmp_path: Path) -> None:
    with nothing_drawn("making data"):
        if source == "arrays":
            data = se.Data.from_arrays(PIXELS, LABELS, test=(PIXELS, LABELS), validation=0.3)
        elif source == "datasets":
            data = se.Data.from_datasets(Drawing(), test=Drawing(), validation=0.3)
        else:
            loaders = [loader_with_a_generator() if "generator" in source else shuffled_loader() for _ in range(3)]
            data = se.Data.from_loaders(loaders[0], validation=loaders[1], test=loaders[2])
    base = model()
    results: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {
        "example": data.example,
        "shape": lambda: (data.shape, data.kinds, data.pixels, data.target_shape),
        "batches": lambda: [*data.batches("train", 16), *data.batches("test", 16, seed=1)],
        "trace": lambda: se.trace(base, data.example()),
        "learn_scales": lambda: se.learn_scales(base, results["trace"], data, members=2, epochs=1, quiet=True),
        "saliency": lambda: se.saliency(base, results["trace"], results["learn_scales"], data, quiet=True),
        "select": lambda: se.select(results["trace"], prune=0.5, selection="random", members=2, seed=0),
        "extract": lambda: [se.extract(base, results["trace"], subnet) for subnet in results["select"]],
        "Ensemble": lambda: se.Ensemble(results["extract"], subnets=results["select"]),
        "train": lambda: se.train(results["Ensemble"], data, RECIPE, quiet=True, checkpoint=tmp_path / "checkpoint"),
        "evaluate": lambda: se.evaluate(results["Ensemble"], data, fgsm=[0.1]),
        "corruptions": lambda: source == "arrays" and se.evaluate(results["Ensemble"], data, corruptions=["fog"]),
        "calibrate": lambda: results["Ensemble"].calibrate(data),
        "conformal": lambda: results["Ensemble"].conformal(data, coverage=0.5),
        "save": lambda: results["Ensemble"].save(tmp_path / "ensemble.safetensors"),
        "load": lambda: se.Ensemble.load(tmp_path / "ensemble.safetensors", model=base),
    }
    for name, call in calls.items():
        with nothing_drawn(name):
            results[name] = call()
    ensemble: se.Ensemble = results["load"]
    doors: list[Any] = [PIXELS, PIXELS.numpy(), Drawing(), shuffled_loader(), loader_with_a_generator(), data.test]
    for x in doors:
        for method in (ensemble.predict, ensemble.predict_proba, ensemble.uncertainty, ensemble.predict_set):
            with nothing_drawn(f"{method.__name__}({type(x).__name__})"):
                method(x)
    assert len({states() for _ in range(3) if torch.rand(1) >= 0}) == 3  # drawing is noticed


@pytest.mark.parametrize("method", METHODS)
def test_methods_restore_random_states(method: str, tmp_path: Path) -> None:
    loaders = [shuffled_loader() for _ in range(3)]
    data = se.Data.from_loaders(loaders[0], validation=loaders[1], test=loaders[2])
    base = model()
    with nothing_drawn(method):
        METHODS[method](base, data, members=2, recipe=TWO_EPOCHS, seed=0, quiet=True)


@pytest.mark.parametrize("method", LEARNERS)
def test_learners_restore_random_states(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "THRESHOLDS", (0.0, 0.5))  # a short sweep
    tasks, backbone = make_tasks(tasks=2, per_class=8), BACKBONES["normalized"]()
    options = {"search_epochs": 1} if method == "structured" else {}
    with nothing_drawn("making a learner"):
        learner = LEARNERS[method](backbone, epochs=1, quiet=True, device="cpu", **options)
        other = LEARNERS[method](backbone, epochs=1, quiet=True, device="cpu", **options)
    with nothing_drawn("learn"):
        learner.learn(tasks[0])
    with nothing_drawn("run_sequence"):
        run_sequence(other, tasks, tmp_path)
    with nothing_drawn("save"):
        learner.save(tmp_path / "learner.safetensors")
    with nothing_drawn("load"):
        loaded = type(learner).load(tmp_path / "learner.safetensors", backbone)
    x = PIXELS.new_zeros(4, 1, 7, 7)
    with nothing_drawn("prediction"):
        assert torch.equal(loaded.predict(x, task=0), learner.predict(x, task=0))
        loaded.infer_task(x)
        loaded.network(0)
        loaded.ensemble(0)
        loaded.memory()
    if isinstance(loaded, OwningLearner):
        with nothing_drawn("forget"):
            loaded.capacity()
            loaded.forget(0)


def test_learning_streamed_tasks_restores_random_states() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    with nothing_drawn("learning from a loader"):
        loaders = [loader_with_a_generator() for _ in range(2)]
        data = se.Data.from_loaders(loaders[0], test=loaders[1])
        tasks = split_tasks(data, tasks=1)
        learner = LEARNERS["naive"](backbone, epochs=1, quiet=True)
        learner.learn(tasks[0])


def test_loading_files_restores_random_states(tmp_path: Path) -> None:
    network, backbone = se.zoo.mlp(64), se.zoo.lenet5_backbone(in_channels=1)
    se.Ensemble([network]).save(tmp_path / "ensemble.safetensors")
    LEARNERS["structured"](backbone, device="cpu").save(tmp_path / "learner.safetensors")
    with nothing_drawn("loading"):
        se.Ensemble.load(tmp_path / "ensemble.safetensors")
        LEARNERS["structured"].load(tmp_path / "learner.safetensors")


def test_run_grid_restores_random_states() -> None:
    with nothing_drawn("run_grid"):
        run_grid([Job("a", int)], "sequential")


def test_shuffled_loader_uses_the_programs_random_state() -> None:
    """The order after a seed is the one that the user's own loop sees."""
    torch.default_generator.manual_seed(3)
    seen = torch.cat([targets for _, targets in DataLoader(Drawing(), batch_size=16, shuffle=True)])
    loader = shuffled_loader()
    data = se.Data.from_loaders(loader)
    torch.default_generator.manual_seed(3)
    assert torch.equal(torch.cat([targets for _, targets in data.batches("train", 16)]), seen)
    torch.default_generator.manual_seed(4)
    assert not torch.equal(torch.cat([targets for _, targets in data.batches("train", 16)]), seen)


@pytest.mark.parametrize("where", ["sampler", "batch sampler"])
def test_sampler_generator_is_restored(where: str) -> None:
    sampler = RandomSampler(Drawing(), generator=GENERATOR)
    chosen: dict[str, Any] = {"sampler": sampler, "batch_size": None}  # the sampler gives whole batches
    if where == "batch sampler":
        chosen = {"batch_sampler": BatchSampler(sampler, 16, drop_last=False)}
    with nothing_drawn(where):
        list(iterate_isolated(DataLoader(Drawing(), **chosen)))
