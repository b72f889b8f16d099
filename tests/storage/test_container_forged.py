"""Forged files, small ones that claim large sizes included: an ArtifactError before anything is built."""

import json
import math
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles import artifact
from structured_ensembles.continual import LEARNERS, Learner, storage
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.storage.container import read_container, write_container
from structured_ensembles.storage.files import write_tensors
from tests.support.continual_cases import make_tasks

Forge = Callable[[dict[str, Any], dict[str, Tensor]], None]
MEGABYTES = 250  # that reading a small file may take


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(4, 3, hidden=[5])


def cut() -> se.Ensemble:
    graph = se.trace(mlp(), torch.randn(2, 4))
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    ensemble = se.Ensemble([se.extract(mlp(), graph, subnet) for subnet in subnets], subnets=subnets, classes="abc")
    ensemble.input_shape, ensemble.normalization = (4,), se.Normalization((0.0,) * 4, (1.0,) * 4)
    return ensemble


ENSEMBLES = {
    "cut": cut,
    "batch_ensemble": lambda: se.Ensemble([BatchEnsembleNetwork(mlp(), ["layers.1", "layers.3"], 3)]),
    "mc_dropout": lambda: se.Ensemble([DropoutNetwork(mlp(), ["layers.1"], 3)]),
    "gaussian": lambda: se.Ensemble(
        [mlp()], task="regression", units=se.data.target_scaling.Units((1.0,), 2.0), gaussian=True, threshold=0.5
    ),
}


def learner(method: str) -> Learner:
    torch.manual_seed(0)
    trained = LEARNERS[method](se.zoo.lenet5_backbone(), epochs=0, quiet=True, device="cpu")
    for task in make_tasks(tasks=2, size=8):
        trained.learn(task)
    return trained


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Tensor], str]]:
    """Return structure, tensors and format of one file of each kind."""
    folder, files = tmp_path_factory.mktemp("originals"), {}
    for kind, make in ENSEMBLES.items():
        path = folder / kind
        make().save(path)
        files[kind] = (*read_container(path, artifact.FORMAT, 99, "an ensemble"), artifact.FORMAT)
    for method in LEARNERS:
        path = folder / method
        learner(method).save(path)
        files[method] = (*read_container(path, storage.FORMAT, 99, "a learner"), storage.FORMAT)
    return {
        kind: (structure, {n: t.clone() for n, t in tensors.items()}, form)
        for kind, (structure, tensors, form) in files.items()
    }


def load(path: Path, form: str, **options: Any) -> Any:
    if form == artifact.FORMAT:
        return se.Ensemble.load(path, **options)
    return Learner.load(path, device="cpu", **options)


def forged(originals: Any, kind: str, forge: Forge, path: Path) -> str:
    structure, tensors, form = originals[kind]
    structure, tensors = json.loads(json.dumps(structure)), dict(tensors)
    forge(structure, tensors)
    write_container(path, form, 1, structure, tensors)
    return form


def put(*keys: Any) -> Forge:
    """Set the last value under the keys before it."""
    *keys, last, value = keys  # type: ignore[assignment]

    def forge(structure: dict[str, Any], _: dict[str, Tensor]) -> None:
        container: Any = structure
        for key in keys:
            container = container[key]
        container[last] = value

    return forge


def both(*forges: Forge) -> Forge:
    def forge(structure: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for forge_one in forges:
            forge_one(structure, tensors)

    return forge


def tensor(name: str, value: Tensor | None) -> Forge:
    def forge(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return forge


GREEDY = {
    "members": ("cut", put("members", 700_000_000)),
    "members of a dropout": ("mc_dropout", put("conversions", 0, "members", 2_000_000)),
    "members of a batch ensemble": ("batch_ensemble", put("conversions", 0, "members", 2_000_000)),
    "features of a batch ensemble": ("batch_ensemble", put("model", "arguments", "in_features", 10**9)),
    "layers of a conversion": ("mc_dropout", put("conversions", 0, "layers", ["layers.1"] * 200_000)),
    "hidden layers": ("cut", put("model", "arguments", "hidden", [1] * 300_000)),
    "too wide for any tensor": ("cut", put("model", "arguments", "in_features", 2**62)),
    "a size that no integer holds": ("cut", put("model", "arguments", "in_features", 10**30)),
    "scales that make a tensor larger": (
        "cut",
        both(
            tensor("0.layers.1.weight", torch.zeros(1, 30_000, dtype=torch.int8)),
            tensor("0.layers.1.weight#scale", torch.ones(30_000)),
        ),
    ),
    "channels of a backbone": ("naive", put("model", "arguments", "in_channels", 10_000_000)),
    "shape of an input": ("naive", put("tasks", 0, "shape", [1, 40_000, 40_000])),
    "head": ("naive", put("settings", "head", "paper")),
    "classes": (
        "naive",
        both(put("tasks", 0, "names", ["x"] * 300_000), put("tasks", 0, "classes", list(range(300_000)))),
    ),
    "stages": ("structured", put("details", "stages", "1", 10**9)),
    "mask": ("supsup", tensor("own.0.conv3.weight", torch.zeros(1, dtype=torch.uint8))),
    "factors": ("batch-ensemble", tensor("own.0.conv3.weight#outputs", torch.zeros(10**6))),
}


@pytest.mark.parametrize("case", GREEDY)
def test_small_file_cannot_allocate_much_memory(case: str, originals: Any, tmp_path: Path) -> None:
    kind, forge = GREEDY[case]
    form = forged(originals, kind, forge, tmp_path / "file")
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if case == "features of a batch ensemble":  # costs nothing: its tensors say how wide it is
        assert load(tmp_path / "file", form).members[0].network.layers[1].in_features == 4
    else:
        with pytest.raises(se.ArtifactError, match="file"):
            load(tmp_path / "file", form)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES
    assert time.monotonic() - start < 20


def repeat_a_task(structure: dict[str, Any], _: dict[str, Tensor]) -> None:
    structure["tasks"] *= 2


@pytest.mark.parametrize(
    ("kind", "forge", "reason"),
    [
        ("batch_ensemble", put("conversions", 0, "members", 4), "which its tensors do not have"),
        ("naive", repeat_a_task, "two tasks of the same number"),
        ("cut", put("members", True), "members is True"),
    ],
)
def test_counts_that_do_not_match_the_tensors_are_refused(
    kind: str, forge: Forge, reason: str, originals: Any, tmp_path: Path
) -> None:
    form = forged(originals, kind, forge, tmp_path / "file")
    with pytest.raises(se.ArtifactError, match=reason):
        load(tmp_path / "file", form)


def test_large_inputs_are_accepted_if_the_caller_gives_the_backbone(
    originals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = forged(originals, "naive", lambda *_: None, tmp_path / "file")
    monkeypatch.setattr(storage, "MAX_VALUES", 63)
    with pytest.raises(se.ArtifactError, match="64 values each; pass the backbone as backbone="):
        load(tmp_path / "file", form)
    assert load(tmp_path / "file", form, backbone=se.zoo.lenet5_backbone()).learned[0].shape == (1, 8, 8)


def networks_that_do_not_run() -> dict[str, tuple[str, Forge]]:
    """Combine valid fields that do not fit together, which otherwise only a prediction would notice."""
    return {
        "another width": ("cut", tensor("0.layers.1.weight", torch.zeros(3, 7))),
        "another bias": ("gaussian", tensor("0.layers.3.bias", torch.zeros(2))),
        "another type": ("cut", tensor("1.layers.3.weight", torch.zeros(3, 3, dtype=torch.float64))),
        "complex numbers": ("mc_dropout", tensor("0.network.layers.3.bias", torch.zeros(3, dtype=torch.complex64))),
        "means for other channels": ("cut", put("normalization", [[0.0] * 3, [1.0] * 3])),
        "no means": ("naive", put("tasks", 0, "normalization", [[], []])),
        "a head of another width": ("structured", tensor("heads.0.weight", torch.zeros(2, 7))),
        "a head of another type": ("supsup", tensor("heads.0.weight", torch.zeros(2, 120, dtype=torch.float64))),
    }


@pytest.mark.parametrize("case", networks_that_do_not_run())
def test_file_whose_networks_do_not_run_is_refused_on_load(case: str, originals: Any, tmp_path: Path) -> None:
    kind, forge = networks_that_do_not_run()[case]
    if kind == "cut":
        forge = both(put("input_shape", [4]), forge)
    form = forged(originals, kind, forge, tmp_path / "file")
    with pytest.raises(se.ArtifactError, match="file"):
        load(tmp_path / "file", form)


@pytest.mark.parametrize("name", [name for name in se.zoo.__all__ if not name.startswith("vgg")])
def test_every_zoo_network_runs_after_loading(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = se.zoo.mlp(64) if name == "mlp" else getattr(se.zoo, name)(in_channels=1)
    ensemble = se.Ensemble([model], normalization=se.Normalization((0.5,), (0.2,)))
    ensemble.input_shape, ensemble.pixels = (1, 8, 8), True
    ensemble.save(tmp_path / "file")
    loaded = se.Ensemble.load(tmp_path / "file")
    x = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(loaded(x), ensemble.eval()(x))


WRONG_VALUES = (
    None,
    True,
    0,
    -1,
    3,
    10**30,
    1.5,
    math.inf,
    "x",
    "",
    "7",
    [],
    [None],
    [[]],
    ["x", 1],
    {},
    {"a": 1},
    {"several": 5},
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the key paths of all values in nested lists and dicts."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


@pytest.mark.parametrize("kind", [*ENSEMBLES, *LEARNERS])
def test_fields_of_a_wrong_type_are_refused(kind: str, originals: Any, tmp_path: Path) -> None:
    """Any value under any key path loads or raises an ArtifactError."""
    draw, path = random.Random(kind), tmp_path / "file"
    paths = list(paths_in(originals[kind][0]))
    refused = 0
    rounds = 60 if kind in ENSEMBLES else 20
    for key_path, value in ((draw.choice(paths), draw.choice(WRONG_VALUES)) for _ in range(rounds)):
        form = forged(originals, kind, put(*key_path, value), path)
        try:
            load(path, form)
        except se.ArtifactError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017
            assert len(str(error)) < 1000  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"{key_path} = {value!r}") from error
    assert refused > rounds // 4


@pytest.mark.parametrize("kind", [*ENSEMBLES, *LEARNERS])
def test_missing_fields_and_tensors_are_refused(kind: str, originals: Any, tmp_path: Path) -> None:
    structure, tensors, _ = originals[kind]
    optional = {"torch", "storage", "threshold", "pixels", "ids", "id_limit", "target_shape", "gaussian", "units"}
    optional |= {"base_shapes"}  # of earlier versions, or to be read by people
    for field in structure.keys() - optional:
        form = forged(originals, kind, lambda fields, _, field=field: fields.pop(field), tmp_path / "file")
        if field in ("conversions", "calibration"):
            continue
        with pytest.raises(se.ArtifactError):
            load(tmp_path / "file", form)
    for name in random.Random(0).sample(sorted(tensors), 3):
        for value in (None, torch.zeros(1, 1, 1, 1, 1)):
            form = forged(originals, kind, tensor(name, value), tmp_path / "file")
            with pytest.raises(se.ArtifactError):
                load(tmp_path / "file", form)
    form = forged(originals, kind, tensor("stranger", torch.zeros(1)), tmp_path / "file")
    with pytest.raises(se.ArtifactError, match="stranger"):
        load(tmp_path / "file", form)


@pytest.mark.parametrize(
    "envelope",
    [
        5,
        [],
        {},
        {"version": "1", "sha256": "", "structure": ""},
        {"version": math.inf, "sha256": "", "structure": ""},
        {"version": None, "sha256": "", "structure": ""},
        {"version": 1, "sha256": 5, "structure": 5},
        {"version": 1, "sha256": 5, "structure": ["x"]},
    ],
)
def test_forged_envelope_is_refused(envelope: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {}, {artifact.FORMAT: json.dumps(envelope)})
    with pytest.raises(se.ArtifactError, match="file is damaged, or not an ensemble at all"):
        se.Ensemble.load(path)


def test_structures_of_another_type_or_depth_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for structure in ([], "x", None):
        write_container(path, artifact.FORMAT, 1, structure, {})  # type: ignore[arg-type]
        with pytest.raises(se.ArtifactError, match="its structure is"):
            se.Ensemble.load(path)
    write_tensors(path, {}, {artifact.FORMAT: "[" * 10**6})
    with pytest.raises(se.ArtifactError, match="is damaged, or not an ensemble"):
        se.Ensemble.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are a matter of POSIX")
def test_pipes_and_devices_are_neither_read_nor_replaced_by_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    device = tmp_path / "device"
    device.symlink_to("/dev/zero")  # not the device itself, which a mistake of ours would replace
    for path, kind in ((tmp_path / "pipe", "pipe"), (device, "device"), (tmp_path, "folder")):
        for read in (se.Ensemble.load, Learner.load):
            with pytest.raises(se.ArtifactError, match=f"is a {kind}, not a"):
                read(path)
        with pytest.raises(ValueError, match=f"is a {kind}, not a regular file"):
            cut().save(path)
    assert (tmp_path / "pipe").is_fifo()
    assert device.is_symlink()


@pytest.mark.parametrize(
    "group",
    [
        {"group": 5, "size": 3, "kept": [0]},
        {"group": "a", "size": "3", "kept": [0]},
        {"group": "a", "size": 3, "kept": "012"},
        {"group": "a", "size": 3, "kept": [True]},
        {"group": "a", "size": 3, "kept": [0.5]},
        {"group": "a", "size": 3, "kept": [2, 1]},
        {"group": "a", "size": 3, "kept": [1, 1]},
        {"group": "a", "size": 3, "kept": [3]},
        {"group": "a", "size": 3, "kept": [-1]},
        {"group": "a", "size": math.inf, "kept": [1]},
        [1],
        None,
    ],
)
def test_forged_subnet_is_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="not the JSON of a Subnet"):
        se.Subnet.from_json(json.dumps([group]))
