"""Run identity: a folder or checkpoint belongs to one run; any change of the result is refused and named."""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles import build
from structured_ensembles.data.splits import TensorSplit, fingerprint_split
from structured_ensembles.methods import METHODS
from structured_ensembles.resuming import identity
from structured_ensembles.resuming.folder import FILE
from structured_ensembles.storage.fingerprints import UnidentifiedError, describe, digest_module, digest_tensors

RECIPE = se.Recipe(epochs=1, batch_size=32)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(60, 6, generator=GENERATOR)
Y = torch.arange(60) % 3
SCALE = 2.0


class Settings:
    """Settings in an object, as some networks keep them."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.itself = self


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Net(nn.Module):
    """A perceptron with a non-persistent buffer and settings."""

    def __init__(self, slope: float = 0.5, factor: float = 1.0, slotted: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.slope = slope
        self.settings, self.slotted = Settings(factor), [Slotted(slotted)]
        self.register_buffer("shift", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(x) + self.shift, self.slope))


def net(seed: int = 0, **settings: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**settings)


def data(inputs: Tensor = X, targets: Tensor = Y, **settings: Any) -> se.Data:
    return se.Data.from_arrays(inputs, targets, validation=0.2, **{"standardize": False, **settings})


def made(
    method: str, folder: Path, model: nn.Module | None = None, samples: se.Data | None = None, **changes: Any
) -> Any:
    method_settings = {"search_epochs": 1} if method == "structured" else {"cycle": 1} if method == "snapshot" else {}
    settings = {"members": 2, "recipe": RECIPE, "folder": folder, "quiet": True, **method_settings, **changes}
    return METHODS[method](model or net(), samples or data(), **settings)


def with_(model: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    with torch.no_grad():
        change(model)
    return model


def changed(sample: int, split: str = "train") -> se.Data:
    """Change one number of one sample."""
    changed_data = data(X.clone())
    changed_split = getattr(changed_data, split)
    changed_split.inputs[changed_split.index[sample], 5] += 1e-3
    return changed_data


def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return SCALE * F.cross_entropy(outputs, targets)


def doubled(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


OTHER: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "weights": (lambda: {"model": net(1)}, "weights"),
    "one weight": (lambda: {"model": with_(net(), lambda m: m.second.bias[2].add_(1e-6))}, "weights"),
    "a buffer that no file keeps": (lambda: {"model": with_(net(), lambda m: m.shift.add_(1))}, "buffers"),
    "a setting of the network": (lambda: {"model": net(slope=0.1)}, "architecture"),
    "a setting in an object": (lambda: {"model": net(factor=2.0)}, "architecture"),
    "a setting in an object with slots": (lambda: {"model": net(slotted=2.0)}, "architecture"),
    "a frozen layer": (lambda: {"model": with_(net(), lambda m: m.first.requires_grad_(False))}, "architecture"),
    "a hook": (lambda: {"model": with_(net(), lambda m: m.register_forward_hook(doubled))}, "architecture"),
    "the last sample": (lambda: {"samples": changed(-1)}, "training data"),
    "a sample of many": (lambda: {"samples": changed(7)}, "training data"),
    "a validation sample": (lambda: {"samples": changed(3, "validation")}, "validation data"),
    "a label": (lambda: {"samples": data(targets=torch.where(torch.arange(60) == 9, 2, Y))}, "training data"),
    "normalization": (lambda: {"samples": data(normalization=(0.5, 0.5))}, "normalization"),
    "names of the classes": (lambda: {"samples": data(classes=["a", "b", "c"])}, "classes"),
    "seed": (lambda: {"seed": 1}, r"seed \(there 0, here 1\)"),
    "members": (lambda: {"members": 3}, r"members \(there 2, here 3\)"),
    "rate": (lambda: {"recipe": replace(RECIPE, rate=0.2)}, r"recipe.rate \(there 0.1, here 0.2\)"),
    "rules": (lambda: {"recipe": replace(RECIPE, rules=(se.ParameterRule("*.bias", 2.0),))}, "recipe.rules"),
    "prune": (lambda: {"prune": 0.3}, r"prune \(there 0.5, here 0.3\)"),
    "prune in another scope": (lambda: {"prune": 0.3, "scope": "network"}, "prune .*, scope"),
    "memory": (lambda: {"memory": 1.0}, "prune .*, memory"),
    "reinit": (lambda: {"reinit": True}, r"reinit \(there False, here True\)"),
    "rescale": (lambda: {"rescale": True}, "rescale"),
    "coupled": (lambda: {"coupled": True}, "coupled"),
    "round_to": (lambda: {"round_to": 2}, "round_to"),
    "diversity": (lambda: {"diversity": None}, "diversity"),
    "strength": (lambda: {"strength": 0.2}, "strength"),
    "initial": (lambda: {"initial": "N(0,2)"}, "initial"),
    "placement": (lambda: {"placement": "norm"}, "placement"),
    "search_epochs": (lambda: {"search_epochs": 0}, "search_epochs"),
    "selection": (lambda: {"selection": "random"}, "selection"),
    "loss": (lambda: {"loss": scaled_loss}, "loss"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_folder = tmp_path_factory.mktemp("structured")
    made("structured", run_folder)
    return run_folder


@pytest.mark.parametrize("case", OTHER)
def test_changes_of_the_result_are_refused_and_named(case: str, folder: Path) -> None:
    changes, name = OTHER[case]
    with pytest.raises(ValueError, match=rf"is of another run, which differs in {name}.*choose another, or delete it"):
        made("structured", folder, **changes())


def test_changes_without_effect_on_the_result_resume_the_run(folder: Path) -> None:
    first = made("structured", folder)
    execution = se.Execution(engine="loop", streams=1)
    again = made(
        "structured", folder, net().eval(), execution=execution, device="cpu", quiet=False, prune=0.5, seed=np.int64(0)
    )
    moved = data(X.flip(0).clone().flip(0)[:, torch.arange(6)])  # the same samples, otherwise stored
    for other in (again, made("structured", folder, samples=moved), made("structured", folder, temperature=2.0)):
        assert torch.equal(first.logits(X), other.logits(X))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "structured"])
def test_every_method_has_one_identity(method: str, tmp_path: Path) -> None:
    first = made(method, tmp_path)
    assert torch.equal(first.logits(X), made(method, tmp_path).logits(X))
    method_changes: dict[str, dict[str, Any]] = {
        "mc-dropout": {"probability": 0.5},
        "batch-ensemble": {"repeat": "split"},
        "snapshot": {"cycle": 2},
        "narrow": {"prune": 0.3},
        "prune-and-tune": {"peak_rate": 0.01},
        "magnitude": {"prune": 0.3, "scope": "network"},
        "taught": {"share": 0.8},
        "random": {"reinit": True},
    }
    others: list[tuple[dict[str, Any], str]] = [
        ({"model": net(1)}, "weights"),
        ({"seed": 1}, "seed"),
        ({"samples": changed(-1)}, "training data"),
        *([] if method == "taught" else [({"loss": scaled_loss}, "loss")]),  # a teacher needs that of the task
        (method_changes[method], next(iter(method_changes[method])))
        if method in method_changes
        else ({"model": net(slope=0.1)}, "architecture"),
    ]
    for changes, name in others:
        with pytest.raises(ValueError, match=rf"is of another run, which differs in {name}"):
            made(method, tmp_path, **changes)
    other = "deep" if method not in ("deep", "single") else "snapshot"
    with pytest.raises(ValueError, match="is of another run, which differs in method"):
        made(other, tmp_path)


@pytest.mark.parametrize("other", [{"seed": 1}, {"model": net(1)}, {"samples": changed(0)}])
def test_run_killed_after_the_search_is_not_continued_with_other_settings(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made("structured", tmp_path / "whole")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(build, "train", killed)
        with pytest.raises(KeyboardInterrupt):
            made("structured", tmp_path / "killed")
    with pytest.raises(ValueError, match="is of another run"):
        made("structured", tmp_path / "killed", **other)
    monkeypatch.setattr(build, "learn_scales", lambda *_, **__: pytest.fail("it searches again"))
    assert torch.equal(made("structured", tmp_path / "killed").logits(X), expected.logits(X))


def test_failed_call_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        made("structured", tmp_path, loss=broken_loss)
    assert (tmp_path / FILE).exists()
    made("structured", tmp_path, seed=1)


def broken_loss(outputs: Tensor, targets: Tensor, missing: Tensor) -> Tensor:
    return outputs.mean()


def test_damaged_files_of_a_run_are_refused(tmp_path: Path) -> None:
    made("structured", tmp_path)
    path = tmp_path / "subnets.json"
    text = path.read_text()
    path.write_text(text.replace("3", "2", 1))  # still a choice of neurons
    with pytest.raises(ValueError, match=r"subnets.json is damaged: its contents .*; delete the folder"):
        made("structured", tmp_path)
    path.write_text(text)
    made("structured", tmp_path)
    about = tmp_path / FILE
    known = about.read_text()
    assert '"seed": 0' in known
    for broken in ("{", "[]", "{}", '{"parts": 1, "files": {}}'):
        about.write_text(broken)
        with pytest.raises(ValueError, match=r"identity.json is damaged"):
            made("structured", tmp_path)
    about.write_text(known.replace('"seed": 0', '"seed": 1'))  # still an identity
    with pytest.raises(ValueError, match=r"identity.json is damaged: its contents do not match its checksum"):
        made("structured", tmp_path)
    about.unlink()
    with pytest.raises(ValueError, match=r"has a checkpoint, but no identity.json"):
        made("structured", tmp_path)


def test_arrays_changed_in_place_change_the_fingerprint(tmp_path: Path) -> None:
    inputs = X.numpy().copy()
    samples = data(torch.from_numpy(inputs))
    made("deep", tmp_path, samples=samples)
    assert isinstance(samples.train, TensorSplit)
    inputs[int(samples.train.index[1]), 0] += 1
    with pytest.raises(ValueError, match="differs in training data"):
        made("deep", tmp_path, samples=samples)


def test_checkpoint_error_of_train_names_the_difference(tmp_path: Path) -> None:
    def trained(model: nn.Module, samples: se.Data | None = None, **settings: Any) -> None:
        path = tmp_path / "checkpoint.safetensors"
        se.train(se.Ensemble([model]), samples or data(), RECIPE, checkpoint=path, quiet=True, **settings)

    trained(net())
    trained(net())
    shifted = with_(net(), lambda model: model.shift.add_(1))
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((net(1),), {}, "weights: .*call torch.manual_seed before it is made"),
        ((shifted,), {}, "buffers"),
        ((net(), changed(2, "validation")), {}, "validation data"),
        ((net(),), {"seed": 3}, r"seed \(there 0, here 3\)"),
        ((net(),), {"numbers": [1]}, "numbers"),
        ((net(),), {"loss": scaled_loss}, "loss: .*loss_name="),
    ]
    for arguments, settings, message in cases:
        with pytest.raises(ValueError, match=f"checkpoint .* is of another run, which differs in {message}"):
            trained(*arguments, **settings)
    with pytest.raises(ValueError, match=r"checkpoint= needs a loss .* a lambda.*loss_name="):
        trained(net(), loss=lambda outputs, targets: 2 * F.cross_entropy(outputs, targets))


def test_a_search_offers_no_argument_that_it_lacks(tmp_path: Path) -> None:
    model, data = se.zoo.mlp(64, hidden=(8,)), se.load_data("digits")
    graph = se.trace(model, data.example())
    with pytest.raises(ValueError, match=r"checkpoint= needs a loss .* a lambda.*: leave checkpoint= out, or make it"):
        se.learn_scales(
            model,
            graph,
            data,
            members=2,
            loss=lambda outputs, targets: 2 * F.cross_entropy(outputs, targets),
            checkpoint=tmp_path / "search.safetensors",
        )


# Losses -------------------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self, power: float, weight: Tensor | None = None) -> None:
        super().__init__()
        self.power, self.inner = power, nn.CrossEntropyLoss(weight)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner(outputs, targets) ** self.power

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


class Powered:
    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) ** self.power


def powered(outputs: Tensor, targets: Tensor, power: float = 1.0) -> Tensor:
    return F.cross_entropy(outputs, targets) ** power


def local() -> Callable[[Tensor, Tensor], Tensor]:
    def inner(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    return inner


def wrapped(power: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a function as a decorator does, with the name of another."""

    @wraps(powered)
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return powered(outputs, targets, power)

    return loss


def with_default(power: float) -> FunctionType:
    """Make the function `powered` with another default."""
    return FunctionType(powered.__code__, powered.__globals__, "powered", (power,))


MODULE_LAMBDA = lambda outputs, targets: 2 * F.cross_entropy(outputs, targets)  # noqa: E731


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda outputs, targets: 2 * F.cross_entropy(outputs, targets), "a lambda"),
        (MODULE_LAMBDA, "a lambda"),
        (local(), "a function within another"),
        (partial(local()), "a function within another"),
        (partial(powered, power=MODULE_LAMBDA), "a lambda"),
        (Powered(local()), "a function within another"),  # type: ignore[arg-type]
        (Weighted(MODULE_LAMBDA), "a lambda"),  # type: ignore[arg-type]
        (torch.jit.trace(powered, (torch.rand(2, 3), torch.tensor([0, 1]))), "a .*ScriptFunction"),
    ],
)
def test_unidentifiable_loss_needs_a_name(
    loss: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=rf"folder= needs a loss .* but loss= has {kind}.*loss_name="):
        made("deep", tmp_path, loss=loss)
    assert not list(tmp_path.iterdir())  # before anything is written
    monkeypatch.setattr("structured_ensembles.methods.deep.train", lambda *_, **__: None)
    made("deep", tmp_path, loss=loss, loss_name="mine")
    made("deep", tmp_path, loss=loss, loss_name="mine")


def test_named_loss_is_identified_by_its_name(tmp_path: Path) -> None:
    losses = [lambda outputs, targets, power=power: powered(outputs, targets, power) for power in (1.0, 2.0)]
    made("deep", tmp_path, loss=losses[0], loss_name="one")
    made("deep", tmp_path, loss=losses[0], loss_name="one")
    with pytest.raises(ValueError, match=r"differs in loss \(there 'named one', here 'named two'\)"):
        made("deep", tmp_path, loss=losses[1], loss_name="two")
    for wrong, message in (({"loss_name": "one"}, "there is no loss="), ({"loss": powered, "loss_name": ""}, "a name")):
        with pytest.raises(ValueError, match=message):
            made("deep", tmp_path, **wrong)


def test_equal_losses_have_equal_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [
        (powered, powered),
        (partial(powered, power=2.0), partial(powered, power=2.0)),
        (Weighted(2.0, torch.ones(3)), Weighted(2.0, torch.ones(3))),
        (Powered(2.0), Powered(2.0)),
        (wrapped(2.0), wrapped(2.0)),
        (with_default(2.0), with_default(2.0)),
        (Weighted(2.0).method, Weighted(2.0).method),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)),
    ]
    for one, other in same:
        assert describe(one) == describe(other)
    different = [
        (powered, scaled_loss),
        (partial(powered, power=2.0), partial(powered, power=3.0)),
        (Weighted(2.0), Weighted(3.0)),
        (Weighted(2.0, torch.ones(3)), Weighted(2.0, torch.tensor([1.0, 1.0, 2.0]))),
        (Powered(2.0), Powered(3.0)),
        (wrapped(2.0), wrapped(3.0)),
        (with_default(2.0), with_default(3.0)),
        (Weighted(2.0).method, Weighted(3.0).method),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
        (F.cross_entropy, F.nll_loss),
    ]
    for one, other in different:
        assert describe(one) != describe(other)
    before = describe(scaled_loss)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert describe(scaled_loss) != before
    json.dumps(before)


@dataclass
class Scheme:
    """A dataclass whose default is a function without a name of its own."""

    weigh: Callable[[Tensor], Tensor] = lambda errors: errors


def test_a_class_counts_by_its_name_even_if_it_is_a_dataclass() -> None:
    assert describe(partial(powered, Scheme)) == describe(partial(powered, Scheme))
    assert describe(Scheme) == f"{__name__}:Scheme"
    with pytest.raises(UnidentifiedError, match="a lambda"):
        describe(Scheme())


def test_functions_of_one_name_differ_by_their_code() -> None:
    def defined(body: str) -> Any:
        space: dict[str, Any] = {"F": F, "__name__": "mine"}
        exec(f"def helper(x):\n    return x\ndef loss(outputs, targets):\n    {body}", space)
        return describe(space["loss"])

    plain = "return helper(F.mse_loss(outputs, targets))"
    assert defined(plain) == defined(f"'''A docstring.'''\n    # a comment\n    {plain}")
    for other in (plain.replace("mse_loss", "l1_loss"), plain + " * 2", plain.replace("helper", "2 * helper")):
        assert defined(other) != defined(plain)


def test_network_fingerprint_covers_its_code() -> None:
    def architecture(body: str, slope: float = 0.1) -> str:
        space: dict[str, Any] = {"nn": nn, "F": F, "__name__": "mine"}
        exec(f"class Net(nn.Module):\n    slope = {slope}\n    def forward(self, x):\n        return {body}", space)
        return digest_module(space["Net"]())["architecture"]

    assert architecture("F.relu(x)") == architecture("F.relu(x)")
    assert architecture("F.relu(x)") != architecture("F.gelu(x)")
    assert architecture("F.relu(x)") != architecture("F.relu(x)", slope=0.2)
    nets = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(share)) for share in (0.1, 0.2)]
    assert digest_module(nets[0])["architecture"] != digest_module(nets[1])["architecture"]
    knot = nn.Sequential(nn.Linear(2, 2))
    knot[0].parents = [knot]  # a way to keep a module without owning it
    knot[0].act = lambda x: x.relu()
    assert digest_module(knot) == digest_module(copy.deepcopy(knot))
    with pytest.raises(UnidentifiedError, match="lambda"):
        describe(knot)


# Data ---------------------------------------------------------------------------------------------------------------


def test_tensor_fingerprint_covers_values_not_storage() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (values.conj(), values.conj().imag):  # views that torch conjugates or negates when they are read
        assert digest_tensors([("", lazy)]) == digest_tensors([("", torch.tensor(lazy.tolist()))])
    assert digest_tensors([("", values)]) != digest_tensors([("", values.conj())])
    assert digest_tensors([("", torch.zeros(0, 2))]) != digest_tensors([("", torch.zeros(0, 3))])


def test_identity_covers_the_recipe_and_the_precision_only() -> None:
    entries = identity.compute_identity(net(), data(), RECIPE, se.Execution(), None, None, "folder=")
    assert {f"recipe.{name}" for name in RECIPE.to_dict()} <= entries.keys()
    assert {name for name in entries if name.startswith("execution.")} == {"execution.precision"}


def test_data_fingerprint_covers_preparation() -> None:
    before = identity.digest_data(data())
    for name, value in (("normalization_settled", not data().normalization_settled), ("ids", not data().ids)):
        assert identity.digest_data(replace(data(), **{name: value})) != before, name


def test_split_fingerprint_covers_samples_not_storage() -> None:
    index = torch.tensor([1, 3, 4])
    one = TensorSplit(X, Y, index)
    assert fingerprint_split(one) == fingerprint_split(TensorSplit(X[index], Y[index], torch.arange(3)))
    assert fingerprint_split(one) != fingerprint_split(TensorSplit(X, Y, index.flip(0)))
    assert fingerprint_split(one) != fingerprint_split(TensorSplit(X.double(), Y, index))
    both = [TensorSplit({name: X, "b": X}, Y, index) for name in ("a", "c")]
    assert fingerprint_split(both[0]) != fingerprint_split(both[1])
    many = torch.zeros(5000, 2)
    before = fingerprint_split(TensorSplit(many, many[:, 0], torch.arange(5000)))
    many[4321, 1] = 1
    assert fingerprint_split(TensorSplit(many, many[:, 0], torch.arange(5000))) != before


def test_loader_fingerprint_covers_data_set_and_first_batch(tmp_path: Path) -> None:
    def loaded(inputs: Tensor) -> se.Data:
        dataset = TensorDataset(inputs, Y)
        return se.Data.from_loaders(DataLoader(dataset, batch_size=60, shuffle=True), classes=3)

    made("deep", tmp_path, samples=loaded(X))
    made("deep", tmp_path, samples=loaded(X))
    with pytest.raises(ValueError, match="differs in training data"):
        made("deep", tmp_path, samples=loaded(X + 1))

    later = X.clone()
    later[50] += 1

    def in_order(inputs: Tensor) -> se.Data:
        return se.Data.from_loaders(DataLoader(TensorDataset(inputs, Y), batch_size=20), classes=3)

    assert fingerprint_split(in_order(X).train) == fingerprint_split(in_order(X.clone()).train)
    assert fingerprint_split(in_order(X).train) != fingerprint_split(in_order(later).train)  # after the first batch

    class Noisy(TensorDataset):
        draws = np.random.default_rng()

        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return inputs + self.draws.normal(), target

    noisy = se.Data.from_loaders(DataLoader(Noisy(X, Y), batch_size=60), classes=3)
    assert fingerprint_split(noisy.train) == fingerprint_split(noisy.train)


def test_fingerprint_of_cifar10_is_fast() -> None:
    images = torch.zeros(50_000, 3, 32, 32, dtype=torch.uint8)
    split = TensorSplit(images, torch.zeros(50_000, dtype=torch.int64), torch.arange(49_000))
    start = time.perf_counter()
    fingerprint_split(split)
    assert time.perf_counter() - start < 1.5  # 0.1 s on an idle core
