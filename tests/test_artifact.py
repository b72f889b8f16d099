"""Files of ensembles: small, complete, without code."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import structured_ensembles as se
from structured_ensembles.artifact import VERSION


def custom(width: int = 6) -> nn.Module:
    """Make a user's network, for `package.module:function`."""
    depthwise = nn.Conv2d(width, width, 3, groups=width)
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), depthwise, nn.Flatten(), nn.Linear(16 * width, 10)
    )


def cut(model: nn.Module, members: int = 3) -> se.Ensemble:
    graph = se.trace(model, torch.randn(2, 1, 8, 8))
    subnets = se.select(graph, prune=0.5, selection="random", members=members)
    ensemble = se.Ensemble(
        [se.extract(model, graph, subnet) for subnet in subnets],
        subnets=subnets,
        classes=[f"digit {n}" for n in range(10)],
        normalization=se.Normalization((0.3,), (0.2,)),
        threshold=0.7,
    )
    ensemble.input_shape = (1, 8, 8)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return ensemble.eval()


@pytest.fixture(scope="module")
def ensemble() -> se.Ensemble:
    torch.manual_seed(0)
    return cut(se.zoo.resnet20(10, in_channels=1))


X = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_ensemble_round_trips_through_a_file(ensemble: se.Ensemble, tmp_path: Path) -> None:
    path = tmp_path / "ensemble.safetensors"
    assert ensemble.save(path) == path.stat().st_size
    loaded = se.Ensemble.load(path)
    assert torch.equal(loaded(X), ensemble(X))
    for name in ("classes", "task", "normalization", "threshold", "subnets", "input_shape"):
        assert getattr(loaded, name) == getattr(ensemble, name)
    assert str(loaded.members[0]) == str(ensemble.members[0])
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_numbers_of_numpy_and_classes_that_are_numbers_are_written_and_read(tmp_path: Path) -> None:
    """A network of as many outputs as the labels say: `labels.max() + 1` of an array is no Python number."""
    model = se.zoo.mlp(4, hidden=(np.int64(8),), num_classes=np.arange(3).max() + 1)
    normalization = se.Normalization(tuple(np.zeros(4, np.float32)), tuple(np.full(4, 2, np.float32)))
    ensemble = se.Ensemble([model], classes=range(3), normalization=normalization)  # type: ignore[arg-type]
    ensemble.save(tmp_path / "file.safetensors")
    loaded = se.Ensemble.load(tmp_path / "file.safetensors")
    assert loaded.classes == ensemble.classes == ("0", "1", "2")
    assert torch.equal(loaded(X.flatten(1)[:, :4]), ensemble.eval()(X.flatten(1)[:, :4]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_tensors_without_elements_are_stored(dtype: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("unused", torch.zeros(2, 0))
    se.Ensemble([model]).save(tmp_path / "file.safetensors", dtype=dtype)  # type: ignore[arg-type]
    assert se.Ensemble.load(tmp_path / "file.safetensors", model=model).members[0].unused.shape == (2, 0)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2e-3), ("int8", 0.05)])
def test_float16_and_int8_storage_is_smaller_and_close(
    ensemble: se.Ensemble, tmp_path: Path, dtype: str, error: float
) -> None:
    full, small = tmp_path / "full", tmp_path / "small"
    assert ensemble.save(small, dtype=dtype) < (0.65 if dtype == "float16" else 0.45) * ensemble.save(full)
    loaded = se.Ensemble.load(small)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
    for name, tensor in ensemble.state_dict().items():
        step = tensor.abs().max() if tensor.dim() > 1 else torch.tensor(1e-6)
        assert float((loaded.state_dict()[name] - tensor).abs().max()) <= error * float(step)
    assert float((loaded.predict_proba(X) - ensemble.predict_proba(X)).abs().mean()) < error


def test_five_half_width_members_take_less_space_than_one_network(tmp_path: Path) -> None:
    model = se.zoo.resnet20(10, in_channels=1)
    one = se.Ensemble([model]).save(tmp_path / "one")
    assert cut(model, members=5).save(tmp_path / "five", dtype="int8") < one


def test_user_network_loads_into_a_given_model(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    model = custom(6)
    ensemble = cut(model)
    ensemble.save(path)
    with pytest.raises(se.ArtifactError, match=r"does not say how its base network is made: pass one as model="):
        se.Ensemble.load(path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = se.Ensemble.load(path, model=model)
    assert torch.equal(loaded(X), ensemble(X))
    assert loaded.members[0][3].groups == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(se.ArtifactError, match="does not fit the base network"):
        se.Ensemble.load(path, model=se.zoo.resnet20(in_channels=1))


def test_code_is_imported_only_with_trust_code(tmp_path: Path) -> None:
    from structured_ensembles.zoo.by_name import build_model

    path = tmp_path / "own.safetensors"
    ensemble = cut(build_model("tests.test_artifact:custom", width=8))
    ensemble.save(path)
    with pytest.raises(se.ArtifactError, match=r"would call tests.test_artifact:custom.*trust_code=True"):
        se.Ensemble.load(path)
    assert torch.equal(se.Ensemble.load(path, trust_code=True)(X), ensemble(X))


def test_damaged_files_are_refused(ensemble: se.Ensemble, tmp_path: Path) -> None:
    path, broken = tmp_path / "whole", tmp_path / "broken"
    ensemble.save(path)
    content = path.read_bytes()
    draw = random.Random(0)
    header = int.from_bytes(content[:8], "little")
    positions = [draw.randrange(8 + header) for _ in range(150)] + [draw.randrange(len(content)) for _ in range(50)]
    expected = ensemble(X)
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << draw.randrange(8)
        broken.write_bytes(flipped)
        try:
            loaded = se.Ensemble.load(broken)
        except se.ArtifactError as error:
            assert str(broken) in str(error)  # noqa: PT017
        else:
            assert torch.equal(loaded(X), expected), f"byte {position} was flipped unnoticed"
    for length in (0, 5, 100, 8 + header, len(content) - 1):
        broken.write_bytes(content[:length])
        with pytest.raises(se.ArtifactError, match="damaged"):
            se.Ensemble.load(broken)


def test_files_of_other_formats_and_newer_versions_are_refused(ensemble: se.Ensemble, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(se.ArtifactError, match="written by something else"):
        se.Ensemble.load(path)
    path.write_bytes(b"PK\x03\x04 this is a zip")
    with pytest.raises(se.ArtifactError, match="damaged, or not an ensemble"):
        se.Ensemble.load(path)
    with pytest.raises(se.ArtifactError, match="there is no file"):
        se.Ensemble.load(tmp_path / "nowhere")
    with pytest.raises(se.ArtifactError, match=r"folder|damaged"):
        se.Ensemble.load(tmp_path)
    ensemble.save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (key, text), *_ = metadata.items()
    save_file(tensors, path, metadata={key: json.dumps({**json.loads(text), "version": 99})})
    with pytest.raises(se.ArtifactError, match=rf"newer version \(format 99, this is {VERSION}\)"):
        se.Ensemble.load(path)


def test_unknown_storage_dtype_is_an_error(ensemble: se.Ensemble, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, int8"):
        ensemble.save(tmp_path / "x", dtype="int4")
