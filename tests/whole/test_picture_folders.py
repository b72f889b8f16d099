"""The whole walk on a folder of pictures: decoded when they are used, the results are those of pictures in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.data.picture_files import PictureSplit
from tests.support.engines import Stopped, stop_before_epoch, use_engine
from tests.support.picture_folder import SHAPES, write_shapes
from tests.support.states import equal, weights

RECIPE = se.Recipe(epochs=3, batch_size=16, rate=0.02)  # "auto" augmentation: crops and flips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    write_shapes(path / "train", count=24)
    write_shapes(path / "test", count=6, seed=1)
    return path


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[se.Data, se.Data]:
    """Return the data in memory, and streamed."""
    cached, streamed = se.Data.from_folder(folder), se.Data.from_folder(folder, cache_bytes=0, workers=2)
    assert all(isinstance(split, PictureSplit) for split in (streamed.train, streamed.validation, streamed.test))
    return cached, streamed


@pytest.fixture(params=["loop", "graph"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_engine(monkeypatch, request.param)
    return str(request.param)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    convolutions = [
        layer
        for inputs, outputs in ((3, 8), (8, 12))
        for layer in (nn.Conv2d(inputs, outputs, 3, stride=2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))


def walk(data: se.Data, path: Path) -> tuple[list[Any], se.Ensemble]:
    """Go the whole walk; return everything that it computes, and the ensemble as it was saved and loaded."""
    model = network()
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=2, epochs=2, batch_size=16, seed=1, quiet=True)
    scores = se.saliency(model, graph, scales, data, batch_size=16, quiet=True)
    subnets = se.select(graph, scores, prune=0.5)
    ensemble = se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    history = se.train(ensemble, data, RECIPE, seed=2, quiet=True)
    ensemble.calibrate(data)
    ensemble.conformal(data, coverage=0.8)
    ensemble.threshold_for(data, keep=0.9)
    ensemble.save(path)
    loaded = se.Ensemble.load(path, model=network())
    figures = se.evaluate(loaded, data, fgsm=(0.02,), corruptions=["gaussian_noise"])
    losses = [row["validation_loss"] for row in history.rows]
    computed = [scales.vectors, [score.values for score in scores], subnets, losses, weights(loaded), figures]
    return computed, loaded


def assert_identical(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert_identical(list(one), list(other))
        assert_identical(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        for value, other_value in zip(one, other, strict=True):
            assert_identical(value, other_value)
    else:
        assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True) if isinstance(one, float) else one == other


@pytest.mark.usefixtures("engine")
def test_streamed_pictures_give_the_results_of_those_in_memory(both: tuple[se.Data, se.Data], tmp_path: Path) -> None:
    (cached, ensemble), (streamed, other) = (walk(data, tmp_path / "ensemble.safetensors") for data in both)
    assert_identical(cached, streamed)
    assert ensemble.classes == SHAPES
    inputs, _ = next(iter(both[0].split("test").batches(18)))
    assert torch.equal(ensemble.predict_proba(inputs), other.predict_proba(both[1].split("test")))


def test_a_member_of_a_fleet_is_the_network_trained_alone(both: tuple[se.Data, se.Data], engine: str) -> None:
    fleet, alone = se.Ensemble([network(0), network(1), network(2)]), se.Ensemble([network(1)])
    se.train(fleet, both[1], RECIPE, seed=3, quiet=True)
    se.train(alone, both[1], RECIPE, seed=3, numbers=[1], quiet=True)
    member, single = weights(fleet.members[1]), weights(alone.members[0])
    if engine == "loop":
        assert equal(member, single)
    else:  # a program adds up several members in another order
        for name, weight in member.items():
            torch.testing.assert_close(weight, single[name], rtol=1e-4, atol=1e-5)
    assert not equal(weights(fleet.members[0]), weights(fleet.members[1]))


@pytest.mark.usefixtures("engine")
def test_a_stopped_run_resumes_to_the_same_weights(
    both: tuple[se.Data, se.Data], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, resumed = (se.Ensemble([network(0), network(1)]) for _ in range(2))
    se.train(whole, both[1], RECIPE, seed=3, quiet=True)
    checkpoint = tmp_path / "checkpoint.safetensors"
    with monkeypatch.context() as patch:
        stop_before_epoch(patch, 2)
        with pytest.raises(Stopped):
            se.train(resumed, both[1], RECIPE, seed=3, checkpoint=checkpoint, quiet=True)
    again = se.Data.from_folder(folder, cache_bytes=0, workers=3)  # as another process would read it
    resumed = se.Ensemble([network(0), network(1)])
    se.train(resumed, again, RECIPE, seed=3, checkpoint=checkpoint, quiet=True)
    assert equal(weights(whole), weights(resumed))
    other = se.Data.from_folder(folder, cache_bytes=0, seed=1)
    with pytest.raises(ValueError, match="training data"):
        se.train(se.Ensemble([network(0), network(1)]), other, RECIPE, seed=3, checkpoint=checkpoint, quiet=True)


def test_a_continual_learner_learns_from_streamed_pictures(both: tuple[se.Data, se.Data]) -> None:
    predictions = []
    for data in both:
        learner = se.continual.StructuredLearner(
            network(), epochs=2, search_epochs=1, batch_size=16, seed=0, quiet=True
        )
        for task in se.continual.split_tasks(data, tasks=3):
            learner.learn(task)
        inputs, _ = next(iter(both[0].split("test").batches(18)))
        predictions.append([learner.logits(inputs, task=task) for task in range(3)])
    assert_identical(*predictions)


def test_commands_take_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, name = tmp_path / "run", f"folder:{folder}?size=16"
    options = ["--model", "mlp", "--method", "deep", "--members", "2", "--epochs", "1", "--out", str(run), "--quiet"]
    config = tmp_path / "options.yaml"
    config.write_text(f"dataset: '{name}'\n")
    assert main(["train", "--config", str(config), *options]) == 0  # a file may name pictures: they are no code
    assert "--trust-code" not in capsys.readouterr().out
    assert main(["evaluate", str(run)]) == 0
    accuracy = json.loads((run / "evaluation-test-mean.json").read_text())["figures"]["cls/accuracy"]
    data = se.load_data(name)
    assert data.shape == (3, 16, 16)
    assert se.evaluate(se.Ensemble.load(run / "ensemble.safetensors"), data)["cls/accuracy"] == accuracy
    assert main(["predict", str(run), str(folder / "test" / "disc" / "000.png")]) == 0
    assert any(shape in capsys.readouterr().out for shape in SHAPES)
    assert main(["datasets"]) == 0
    assert "--dataset folder:PATH?size=64" in capsys.readouterr().out
    assert main(["train", "--dataset", f"folder:{folder / 'train'}", *options]) == 2
    assert "must have a folder test beside train, or a share" in capsys.readouterr().err
    assert main(["train", "--dataset", f"folder:{folder / 'nowhere'}", *options]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
