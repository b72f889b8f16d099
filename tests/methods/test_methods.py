"""Promises of every ensemble method: it learns, resumes, saves, and leaves the model unchanged."""

import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.methods import METHODS
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from tests.support.capture_rules import as_in_a_graph

RECIPE = se.Recipe(epochs=2, batch_size=32, rate=0.1)
OWN = {"structured": {"search_epochs": 1}}
X = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def made(method: str, folder: Path | None = None, **changes: Any) -> tuple[se.Ensemble, nn.Module]:
    torch.manual_seed(0)
    model = se.zoo.mlp(64, hidden=(48, 32))
    settings = {"recipe": RECIPE, "folder": folder, "quiet": True, **OWN.get(method, {}), **changes}
    return METHODS[method](model, se.load_data("digits"), members=2, **settings), model


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest) -> tuple[str, se.Ensemble, nn.Module]:
    return (request.param, *made(request.param))


def test_every_method_learns_and_leaves_the_model_unchanged(trained: tuple[str, se.Ensemble, nn.Module]) -> None:
    method, ensemble, model = trained
    torch.manual_seed(0)
    untouched = se.zoo.mlp(64, hidden=(48, 32))
    assert all(
        torch.equal(parameter, earlier)
        for parameter, earlier in zip(model.parameters(), untouched.parameters(), strict=True)
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(ensemble) == (1 if method == "single" else 2)
    figures = se.evaluate(ensemble, se.load_data("digits"))
    assert figures["cls/accuracy"] > 0.75
    assert figures["size/members"] == len(ensemble)
    assert ensemble.history.epochs == (4 if method == "taught" else 2)  # two of the teacher
    assert ensemble.threshold is not None
    logits = ensemble.logits(X)
    assert logits.shape == (len(ensemble), 20, 10)
    assert method == "single" or not torch.isclose(logits[0], logits[1]).all(-1).any()


def test_every_method_trains_under_inference_mode(trained: tuple[str, se.Ensemble, nn.Module]) -> None:
    method, ensemble, _ = trained
    with torch.inference_mode():
        torch.manual_seed(0)
        model = se.zoo.mlp(64, hidden=(48, 32))
        settings = {"recipe": RECIPE, "quiet": True, **OWN.get(method, {})}
        again = METHODS[method](model, se.load_data("digits"), members=2, **settings)
    assert torch.equal(again.logits(X), ensemble.logits(X))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_method_saves_and_loads(trained: tuple[str, se.Ensemble, nn.Module], tmp_path: Path, dtype: str) -> None:
    _, ensemble, model = trained
    path = tmp_path / "ensemble.safetensors"
    ensemble.save(path, dtype)
    loaded = se.Ensemble.load(path)
    assert len(loaded) == len(ensemble)
    assert len(loaded.members) == len(ensemble.members)
    assert loaded.num_parameters == ensemble.num_parameters
    assert str(loaded) == str(ensemble)
    if dtype == "float32":
        assert torch.equal(loaded.logits(X), ensemble.logits(X))
        assert torch.equal(se.Ensemble.load(path, model=model).logits(X), ensemble.logits(X))
        loaded.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    torch.testing.assert_close(loaded.predict_proba(X), ensemble.predict_proba(X), rtol=0.0, atol=0.05)
    # A member may stand for the base network too: that is how `sens train --storage int8` reads its own file.
    again = se.Ensemble.load(path, model=ensemble.members[0])
    assert torch.equal(again.logits(X), loaded.logits(X))
    for name, tensor in loaded.state_dict().items():
        if tensor.dim() < 2 or name.endswith(("_factors", "biases")):
            assert torch.equal(tensor, ensemble.state_dict()[name])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resumes_to_the_same_weights(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"cycle": 2} if method == "snapshot" else {}
    made(method, tmp_path / "whole", **changes)[0].save(tmp_path / "whole.safetensors")
    replace = os.replace
    epochs = 4 if method == "snapshot" else 2
    for stop in range(1, epochs):
        left = stop

        def killed(temporary: Path, path: Path) -> None:
            nonlocal left
            replace(temporary, path)
            left -= path.name.startswith("checkpoint")
            if not left:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            made(method, tmp_path / f"killed-{stop}", **changes)
        monkeypatch.setattr(os, "replace", replace)
        made(method, tmp_path / f"killed-{stop}", **changes)[0].save(tmp_path / "resumed.safetensors")
        assert (tmp_path / "resumed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_all_methods_share_one_signature() -> None:
    for name, method in METHODS.items():
        parameters = inspect.signature(method).parameters
        assert list(parameters)[:3] == ["model", "data", "members"], name
        keywords = {"recipe", "device", "seed", "folder", "quiet", "loss", "loss_name"}
        assert keywords <= parameters.keys() or parameters["settings"].kind is inspect.Parameter.VAR_KEYWORD, name


def test_narrow_networks_have_the_sizes_of_structured_ones_and_independent_weights() -> None:
    narrow, model = made("narrow", prune=0.7)
    structured, _ = made("random", prune=0.7)
    for narrow_member, structured_member in zip(narrow.members, structured.members, strict=True):
        assert [parameter.shape for parameter in narrow_member.parameters()] == [
            p.shape for p in structured_member.parameters()
        ]
    kept = [size - -(-7 * (size - 1) // 10) for size in (48, 32)]
    shapes = [tuple(parameter.shape) for parameter in narrow.members[0].parameters() if parameter.dim() == 2]
    assert shapes == [(kept[0], 64), (kept[1], kept[0]), (10, kept[1])]
    untrained, _ = made("narrow", prune=0.7, recipe=se.Recipe(epochs=0))
    first, second = (member.layers[1].weight for member in untrained.members)
    rows = model.layers[1].weight
    assert not torch.isclose(first, second).all(1).any()
    assert not torch.isclose(first[:, None], rows[None]).all(-1).any()  # not one neuron of the model is left
    assert float(first.std()) == pytest.approx((2 / 64) ** 0.5, rel=0.1)  # by the model's own initialiser (Kaiming)
    assert narrow.subnets is None
    budget, _ = made("narrow", memory=0.5)
    assert 0.45 < budget.overhead(model) <= 0.5


def test_controls_select_by_their_criterion() -> None:
    first, second = made("random")[0].subnets
    assert first != second
    ensemble, model = made("magnitude", recipe=se.Recipe(epochs=0))
    first, second = ensemble.subnets
    assert first != second  # each is cut out of a network of its own
    # The first is cut out of the model: its largest neurons, with their weights.
    rows = model.layers[1].weight
    largest = rows.abs().mean(1).argsort(descending=True)[: len(first.kept["layers.1"])].sort().values
    assert first.kept["layers.1"] == tuple(largest.tolist())
    assert torch.equal(ensemble.members[0].layers[1].weight, rows[largest])


def converted(kind: str, repeat: str = "tile") -> nn.Module:
    model = se.zoo.resnet20(10, in_channels=1)
    layers = find_called_layers(model, torch.randn(2, 1, 8, 8))
    if kind == "batch-ensemble":
        return BatchEnsembleNetwork(model, layers.all, 3, repeat)
    return DropoutNetwork(model, layers.hidden, 3)


@pytest.mark.parametrize(("kind", "repeat"), [("batch-ensemble", "tile"), ("batch-ensemble", "split"), ("mc", "")])
@pytest.mark.parametrize("training", [False, True])
def test_forward_never_waits_for_the_device(kind: str, repeat: str, training: bool) -> None:
    network, x = converted(kind, repeat).train(training), torch.randn(7, 1, 8, 8)
    with as_in_a_graph():
        outputs = network(x)
    expected_members = 1 if training and (kind == "mc" or repeat == "split") else 3
    assert outputs.shape == (expected_members, 7, 10)


@pytest.mark.parametrize("kind", ["batch-ensemble", "mc"])
@pytest.mark.parametrize("training", [False, True])
def test_channels_last_layout_is_kept(kind: str, training: bool) -> None:
    """Convolutions in bfloat16 are slow on a GPU otherwise."""
    network = converted(kind).to(memory_format=torch.channels_last).train(training)
    seen = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.num_features > 1:
            module.register_forward_pre_hook(lambda _part, inputs: seen.append(inputs[0]))
    network(torch.randn(4, 1, 8, 8).contiguous(memory_format=torch.channels_last))
    assert len(seen) == 19
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)
    assert not any(x.is_contiguous() for x in seen if x.shape[2] > 1)


def test_plain_ensembles_are_written_in_the_first_file_version(tmp_path: Path) -> None:
    def envelope(path: Path) -> dict[str, Any]:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["structured-ensembles"])

    path = tmp_path / "file"
    se.Ensemble([se.zoo.mlp(64)]).save(path)
    assert envelope(path)["version"] == 1
    assert "conversions" not in json.loads(envelope(path)["structure"])
    se.Ensemble([converted("mc"), se.zoo.resnet20(10, in_channels=1)]).save(path)  # both kinds in one file
    assert envelope(path)["version"] == 2
    loaded = se.Ensemble.load(path)
    assert len(loaded) == 4
    assert isinstance(loaded.members[0], DropoutNetwork)
    assert loaded(X).shape == (4, 20, 10)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "hypernetwork"}, "converted by 'hypernetwork', which this version does not know"),
        ({"layers": ["nowhere"]}, "layers must name linear layers and convolutions of the model, not 'nowhere'"),
        ({"depth": 3}, "unexpected keyword argument"),
    ],
)
def test_invalid_conversion_in_a_file_is_an_error(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    class Lying(BatchEnsembleNetwork):
        @property
        def conversion(self) -> dict[str, Any]:
            return {**super().conversion, **changed}

    model = se.zoo.mlp(64)
    path = tmp_path / "file"
    se.Ensemble([Lying(model, find_called_layers(model, X).all, 2)]).save(path)
    with pytest.raises(se.ArtifactError, match=message):
        se.Ensemble.load(path)


def test_user_network_with_nested_layers_round_trips_through_a_file(tmp_path: Path) -> None:
    from tests.support.networks import Nested

    torch.manual_seed(0)
    model, x = Nested(), torch.randn(6, 3, 6, 6)
    layers = find_called_layers(model, x)
    for network in (
        BatchEnsembleNetwork(model, layers.all, 3, seed=2),
        DropoutNetwork(model, layers.hidden, 3, 0.4, 2),
    ):
        ensemble = se.Ensemble([network]).eval()
        ensemble.save(tmp_path / "own")
        with pytest.raises(se.ArtifactError, match="pass one as model="):
            se.Ensemble.load(tmp_path / "own")
        torch.manual_seed(1)
        assert torch.equal(se.Ensemble.load(tmp_path / "own", model=Nested())(x), ensemble(x))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_evaluates_from_the_command_line(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick = ["--model", "mlp", "--epochs", "2", "--members", "2", "--quiet", "true", "--storage", "int8"]
    method_arguments = {
        "structured": '{"search_epochs": 1}',
        "batch-ensemble": '{"repeat": "split"}',
        "mc-dropout": "{}",
    }
    arguments = ["--method_arguments", method_arguments[method]] if method in method_arguments else []
    assert main(["train", "--out", str(folder), "--method", method, *quick, *arguments]) == 0
    assert not list(folder.glob("checkpoint*"))
    assert len((folder / "history.csv").read_text().splitlines()) > 2
    result = json.loads((folder / "result.json").read_text())
    assert main(["evaluate", str(folder)]) == 0
    again = json.loads((folder / "evaluation-test-mean.json").read_text())
    assert {name: again["figures"][name] for name in result["figures"]} == pytest.approx(result["figures"])
    assert again["figures"]["cls/accuracy"] > 0.6


OUTSIDE = '''
from structured_ensembles import Ensemble, train
from structured_ensembles.zoo import mlp

def twins(model, data, members=2, *, recipe, seed, device, folder, quiet, hidden):
    """Ignores the model."""
    ensemble = Ensemble([mlp(64, hidden=hidden) for _ in range(members)])
    train(ensemble, data, recipe, device, seed, checkpoint=folder / "checkpoint.safetensors", quiet=quiet)
    return ensemble
'''


def test_method_outside_the_package_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "laboratory").mkdir()
    (tmp_path / "laboratory" / "ideas.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["train", "--method", "laboratory.ideas:twins", "--model", "mlp", "--members", "3", "--epochs", "2"]
    options = ["--method_arguments", '{"hidden": [20]}', "--quiet", "true", "--out", str(tmp_path / "run")]
    assert main([*command, *options]) == 0
    ensemble = se.Ensemble.load(tmp_path / "run" / "ensemble.safetensors")
    assert len(ensemble) == 3
    assert ensemble.num_parameters == 3 * (65 * 20 + 21 * 10)
    assert not list((tmp_path / "run").glob("checkpoint*"))
    assert main([*command[:2], "laboratory.ideas:nobody", *command[3:], *options]) == 2
    assert "cannot be imported" in capsys.readouterr().err
    assert main(["train", "--method", "boosting"]) == 2
    assert "mc-dropout, prune-and-tune, taught, or package.module:function, not 'boosting'" in capsys.readouterr().err


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_every_method_accepts_models_of_any_dtype(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    data = se.Data.from_arrays(torch.rand(40, 6), torch.arange(40) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    arguments = {"cycle": 1} if method == "snapshot" else OWN.get(method, {})
    ensemble = METHODS[method](model, data, members=2, recipe=se.Recipe(epochs=1), quiet=True, **arguments)
    logits = ensemble.logits(torch.rand(5, 6))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


class Wrapped(nn.Module):
    """Return the logits twice in a container, so that nothing tells which tensor is meant."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = se.zoo.mlp(64, hidden=(8,)), kind

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.inner(x)
        return {"first": logits, "second": logits} if self.kind is dict else self.kind([logits, logits])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [tuple, dict, list])
def test_every_method_refuses_models_that_do_not_return_one_tensor(method: str, kind: type) -> None:
    with pytest.raises(TypeError, match=f"model must return one tensor .*, not a {kind.__name__}: wrap it in"):
        METHODS[method](Wrapped(kind), se.load_data("digits"), members=2, recipe=RECIPE, quiet=True)


@pytest.mark.parametrize("repeat", ["tile", "split"])
@pytest.mark.parametrize("batch", [4, 5])
def test_multi_member_networks_refuse_models_that_do_not_return_one_tensor(repeat: Any, batch: int) -> None:
    x = torch.rand(batch, 1, 8, 8)
    for network in (
        BatchEnsembleNetwork(Wrapped(dict), ["inner.layers.1"], 2, repeat),
        DropoutNetwork(Wrapped(dict), ["inner.layers.1"], 2),
    ):
        for training in (True, False):
            with pytest.raises(TypeError, match="model must return one tensor"):
                network.train(training)(x)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_networks_with_fewer_outputs_than_classes(method: str, tmp_path: Path) -> None:
    digits = se.load_data("digits")
    data = se.Data.from_arrays(digits.train.inputs, digits.train.targets, classes=[f"class {n}" for n in range(12)])
    message = r"model has 10 outputs, but data has 12 classes: .* with_head\(model, 12\)"
    with pytest.raises(ValueError, match=message):
        METHODS[method](se.zoo.mlp(64), data, members=2, recipe=RECIPE, quiet=True, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_names_arguments_that_are_no_network_or_no_data(method: str) -> None:
    with pytest.raises(TypeError, match="data must be a Data, not a Tensor"):
        METHODS[method](se.zoo.mlp(64), X)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not a str"):
        METHODS[method]("resnet20", se.load_data("digits"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_on_epoch_that_is_no_function_before_any_work(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("structured_ensembles.train")  # the package's name of it is the function
    monkeypatch.setattr(module, "train_fleet", lambda *_: pytest.fail("training has begun"))
    with pytest.raises(TypeError, match="on_epoch must be a function of an EpochRow"):
        METHODS[method](se.zoo.mlp(64), se.load_data("digits"), members=2, recipe=RECIPE, quiet=True, on_epoch=5)
