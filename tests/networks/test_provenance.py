"""Provenance of networks: recorded factories, warnings where a file has none, models of another shape."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import structured_ensembles as se
from structured_ensembles.artifact import FORMAT
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.storage.container import checksum

X = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def custom(width: int = 6, kernel: int = 3, classes: int = 10, name: str = "") -> nn.Module:
    """Make a user's network; its code computes with tensors, as many do to space dropout rates."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
    size = 8 - 2 * (kernel - 1)
    return nn.Sequential(
        nn.Conv2d(1, width, kernel),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(rates[1]),
        nn.Conv2d(width, width, kernel),
        nn.Flatten(),
        nn.Linear(size * size * width, classes),
    )


def backbone(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def no_network() -> int:
    return 3


def cut(model: nn.Module, scope: str = "layer") -> se.Ensemble:
    graph = se.trace(model, X[:2])
    subnets = se.select(graph, prune=0.5, selection="random", members=3, scope=scope)
    return se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets], subnets=subnets).eval()


def test_saving_a_network_without_a_factory_warns(tmp_path: Path) -> None:
    for model in (custom(), cut(custom()).members[0]):
        with pytest.warns(UserWarning, match=r"loading it will need model=.*from_factory.*trust_code=True") as caught:
            se.Ensemble([model]).save(tmp_path / "own")
        assert caught[0].filename == __file__
    learner = se.continual.StructuredLearner(backbone(), device="cpu", quiet=True)
    with pytest.warns(UserWarning, match="loading it will need backbone=") as caught:
        learner.save(tmp_path / "learner")
    assert caught[0].filename == __file__


def test_saving_a_network_with_a_factory_does_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (
            se.zoo.mlp(64),
            se.from_factory("tests.networks.test_provenance:custom"),
            cut(se.zoo.mlp(64)).members[1],
        ):
            se.Ensemble([model]).save(tmp_path / "own")
        learner = se.continual.NaiveLearner(
            se.from_factory("tests.networks.test_provenance:backbone"), device="cpu", quiet=True
        )
        learner.save(tmp_path / "learner")


def test_recorded_factory_rebuilds_the_network(tmp_path: Path) -> None:
    ensemble = cut(se.from_factory("tests.networks.test_provenance:custom", width=8, name="mine"))
    path = tmp_path / "own"
    ensemble.save(path)
    with pytest.raises(se.ArtifactError, match=r"would call tests.networks.test_provenance:custom.*trust_code=True"):
        se.Ensemble.load(path)
    before = torch.get_rng_state()
    loaded = se.Ensemble.load(path, trust_code=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loaded(X), ensemble(X))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_recorded_factory_rebuilds_the_backbone(tmp_path: Path) -> None:
    made = se.from_factory("tests.networks.test_provenance:backbone", width=9)
    se.continual.NaiveLearner(made, device="cpu", quiet=True).save(tmp_path / "own")
    with pytest.raises(se.ArtifactError, match=r"would call tests.networks.test_provenance:backbone"):
        se.continual.NaiveLearner.load(tmp_path / "own")
    loaded = se.continual.NaiveLearner.load(tmp_path / "own", trust_code=True, device="cpu")
    assert torch.equal(loaded.backbone(X), made(X))


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("custom", {}, "must be 'package.module:function'"),
        ("tests.networks.test_provenance:", {}, "must be 'package.module:function'"),
        (":custom", {}, "must be 'package.module:function'"),
        ("__main__:custom", {}, "other programs must be able to import it"),
        ("no_such_module:custom", {}, "cannot be imported"),
        ("tests.networks.test_provenance:nothing", {}, "cannot be imported"),
        ("tests.networks.test_provenance:X", {}, "is not a function"),
        ("tests.networks.test_provenance:custom", {"depth": 3}, "takes the arguments width, kernel, classes, name"),
        ("tests.networks.test_provenance:custom", {"width": torch.tensor(3)}, "must be what a file can record as JSON"),
        ("tests.networks.test_provenance:custom", {"width": (1, 2)}, r"such as \{'width': \[1, 2\]\}"),
    ],
)
def test_factory_that_a_file_cannot_record_is_refused(function: str, arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        se.from_factory(function, **arguments)


def test_invalid_factory_is_refused() -> None:
    with pytest.raises(TypeError, match=r"gave a int, not a torch.nn.Module"):
        se.from_factory("tests.networks.test_provenance:no_network")
    with pytest.raises(TypeError, match=r"function must be a str"):
        se.from_factory(custom)


def test_import_error_of_a_factory_is_an_artifact_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_syntax.py").write_text("def net(:\n")
    (tmp_path / "broken_run.py").write_text("{}['width']\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, reason in (("broken_syntax", "SyntaxError"), ("broken_run", r"KeyError\('width'\)")):
        with pytest.raises(ValueError, match=f"model '{name}:net' cannot be imported: {reason}"):
            se.from_factory(f"{name}:net")


class Wrapped(nn.Module):
    """A wrapper of a network that may have been extracted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


Make = Callable[[nn.Module], se.Ensemble]
KINDS: dict[str, Make] = {
    "cut": cut,
    "cut across layers": lambda model: cut(model, "network"),
    "whole": lambda model: se.Ensemble([model, model]),
    "batch ensemble": lambda model: se.Ensemble([BatchEnsembleNetwork(model, ["0", "4"], 3)]),
    "dropout": lambda model: se.Ensemble([DropoutNetwork(model, ["4"], 3, 0.1)]),
}
OTHERS = {
    "wider": {"width": 8},
    "narrower": {"width": 4},
    "a smaller kernel": {"kernel": 2},
    "more classes": {"classes": 12},
    "fewer classes": {"classes": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_loading_into_a_model_of_another_shape_is_refused(kind: str, tmp_path: Path) -> None:
    ensemble = KINDS[kind](custom(6)).eval()
    path = tmp_path / "own"
    ensemble.save(path)
    expected = ensemble(X)
    for settings in OTHERS.values():
        with pytest.raises(se.ArtifactError, match=r"has the shape \(.*\) in the given model, and must have \("):
            se.Ensemble.load(path, model=custom(**settings))
    for model in (custom(6), *ensemble.members):
        assert torch.equal(se.Ensemble.load(path, model=model)(X), expected)


def test_saving_a_loaded_ensemble_gives_the_same_file(tmp_path: Path) -> None:
    ensemble = cut(custom(6))
    ensemble.save(tmp_path / "a")
    loaded = se.Ensemble.load(tmp_path / "a", model=ensemble.members[1])
    loaded.save(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert torch.equal(se.Ensemble.load(tmp_path / "b", model=custom(6))(X), ensemble(X))


def test_extracted_networks_round_trip_inside_a_wrapper_and_with_a_new_head(tmp_path: Path) -> None:
    inner = cut(custom(6))
    ensemble = se.Ensemble([Wrapped(member) for member in inner.members]).eval()
    ensemble.save(tmp_path / "wrapped")
    assert torch.equal(se.Ensemble.load(tmp_path / "wrapped", model=Wrapped(custom(6)))(X), ensemble(X))
    with pytest.raises(se.ArtifactError, match=r"inner\..* has the shape"):
        se.Ensemble.load(tmp_path / "wrapped", model=Wrapped(custom(8)))
    headed = cut(custom(6))
    for member in headed.members:
        member[6] = nn.Linear(member[6].in_features, 4)
    headed.save(tmp_path / "headed")
    for model in (custom(6), custom(6, classes=4)):
        assert torch.equal(se.Ensemble.load(tmp_path / "headed", model=model)(X), headed(X))


def test_members_of_different_widths_round_trip(tmp_path: Path) -> None:
    ensemble = se.Ensemble([custom(6), custom(8)]).eval()
    ensemble.save(tmp_path / "own")
    loaded = se.Ensemble.load(tmp_path / "own", model=custom(8))
    assert torch.equal(loaded(X), ensemble(X))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "own").read_bytes()


def rewritten(path: Path, **changes: Any) -> None:
    """Write other values into the structure of a file, as earlier versions or forgers do."""
    with safe_open(path, "pt") as file:
        envelope = json.loads(file.metadata()[FORMAT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    structure = json.loads(envelope["structure"]) | changes
    text = json.dumps({name: value for name, value in structure.items() if value is not None or name not in changes})
    envelope |= {"structure": text, "sha256": checksum(text, tensors)}
    save_file(tensors, path, metadata={FORMAT: json.dumps(envelope)})


def test_files_of_earlier_versions_accept_any_model_that_fits(tmp_path: Path) -> None:
    ensemble, path = cut(custom(6)), tmp_path / "old"
    ensemble.save(path)
    rewritten(path, base_shapes=None)
    assert torch.equal(se.Ensemble.load(path, model=custom(6))(X), ensemble(X))
    for settings in ({"width": 2}, {"classes": 3}):
        with pytest.raises(se.ArtifactError, match="has the shape"):
            se.Ensemble.load(path, model=custom(**settings))
    se.Ensemble.load(path, model=custom(6)).save(tmp_path / "new")
    assert torch.equal(se.Ensemble.load(tmp_path / "new", model=custom(6))(X), ensemble(X))


@pytest.mark.parametrize(
    "forged", [3, "abc", [3], ["abc"], [["a"]], [{"0.weight": 3}], [{"0.weight": ["a"]}], {"a": 1}]
)
def test_forged_shapes_are_refused(forged: Any, tmp_path: Path) -> None:
    se.Ensemble([custom(6)]).save(tmp_path / "own")
    rewritten(tmp_path / "own", base_shapes=forged)
    with pytest.raises(se.ArtifactError):
        se.Ensemble.load(tmp_path / "own", model=custom(6))
