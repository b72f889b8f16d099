"""The small world under attack: a data set of 120 tiny images, networks with a few neurons, and what they tell."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch
from torch import Tensor

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.data.info import Contents, DataInfo
from structured_ensembles.data.sources import DATA_SETS
from structured_ensembles.methods import METHODS

from .count import CommandError

CLASSES = ("ant", "bee", "cow", "dog")
RECIPE = se.Recipe(epochs=2, batch_size=64)
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    "structured": {"search_epochs": 2},
    "single": {"members": 1},
    "snapshot": {"cycle": 2},
}
TRAIN = ["train", "--dataset", "tiny", "--model", "mlp", "--members", "2", "--epochs", "2", "--device", "cpu"]
TRAIN += ["--quiet", "true", "--model_arguments", "{hidden: [8, 6]}", "--method_arguments", "{search_epochs: 2}"]
CONTINUAL = ["continual", "--dataset", "tiny", "--tasks", "2", "--epochs", "1", "--device", "cpu", "--quiet", "true"]


def images(samples: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pixels (samples, 1, 4, 4) and labels of four classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 4
    noise = torch.randint(0, 120, (samples, 1, 4, 4), generator=generator)
    return (noise + 40 * labels.view(-1, 1, 1, 1)).clamp(0, 255).to(torch.uint8), labels


def _read(_: Sequence[Path]) -> Contents:
    return Contents(*images(), *images(12, seed=1), classes=CLASSES)


def register() -> None:
    """Let the library know the data set, and draw no pictures: what a figure shows takes the place of its drawing."""
    se.trace(network(), data().example())  # loads what every child would load
    DATA_SETS["tiny"] = DataInfo("tiny", "120 tiny images", (1, 4, 4), 4, 120, 12, read=_read)
    matplotlib.figure.Figure.savefig = _sketch  # type: ignore[method-assign]


def _sketch(figure: Any, file: Any, *_: Any, **__: Any) -> None:
    shown = [
        [line.get_xydata().tolist() for line in axes.lines]
        + [patch.get_verts().tolist() for patch in axes.patches]
        + [image.get_array().tolist() for image in axes.images]
        + [text.get_text() for text in axes.texts]
        for axes in figure.axes
    ]
    text = f"<svg>{digest(repr(shown))}</svg>"
    if isinstance(file, io.StringIO):
        file.write(text)
    elif isinstance(file, io.BytesIO):
        file.write(text.encode())
    else:
        Path(file).write_text(text)


@cache
def data() -> se.Data:
    pixels, labels = images()
    return se.Data.from_arrays(pixels, labels, test=images(12, seed=1), classes=CLASSES, name="tiny")


def network(seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return se.zoo.mlp(16, num_classes=4, hidden=(8, 6))


def backbone() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return se.zoo.lenet5_backbone()


def run_method(method: str, folder: Path | None) -> se.Ensemble:
    arguments: dict[str, Any] = {"members": 2, **OWN_ARGUMENTS.get(method, {})}
    return METHODS[method](network(), data(), recipe=RECIPE, folder=folder, device="cpu", quiet=True, **arguments)


def tasks() -> list[Any]:
    return se.continual.split_tasks(data(), tasks=2)


def new_learner(method: str) -> Any:
    arguments = {"search_epochs": 1} if method == "structured" else {}
    return se.continual.LEARNERS[method](backbone(), epochs=1, batch_size=64, device="cpu", quiet=True, **arguments)


# What is told --------------------------------------------------------------------------------------------------------


def digest(*values: Any) -> str:
    """A fingerprint of values: tensors by their bytes, others as they are printed."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(value if isinstance(value, bytes) else repr(value).encode())
    return found.hexdigest()[:16]


def told_by(ensemble: se.Ensemble) -> str:
    """Fingerprint everything that an ensemble says of inputs, and how it was made."""
    x = images(6, seed=2)[0]
    values: list[Any] = [ensemble.logits(x), ensemble.task, ensemble.classes, ensemble.input_shape, ensemble.pixels]
    if ensemble.task == "classification":
        values += [
            ensemble.predict_proba(x),
            ensemble.uncertainty(x).entropy,
            ensemble.keep(x),
            ensemble.predict_set(x),
        ]
    else:
        values += [ensemble.predict(x), ensemble.spread(x), ensemble.predict_interval(x)]
    return digest(*values, repr(ensemble.subnets))


def told_by_learner(learner: Any) -> str:
    """Fingerprint what a learner says of inputs for every task, and what it would learn next from."""
    x = images(6, seed=2)[0]
    logits = [learner.logits(x, task) for task in learner.learned]
    state = [tensor for _, tensor in sorted(learner.backbone.state_dict().items())]
    return digest(*logits, *state, list(learner.learned.values()), sorted(learner.settings.items()), learner.memory())


def told_by_data(found: se.Data) -> str:
    splits = [(split.inputs[split.index], split.targets[split.index]) for split in (found.train, found.split("test"))]
    return digest(*[tensor for pair in splits for tensor in pair], found.classes, found.shape)


def command(*arguments: str | Path) -> str:
    """Run `sens`, in this process; returns what it printed, or raises what it complained of."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    if code == 0:
        return out.getvalue()
    complaint = err.getvalue().strip()
    if code not in (1, 2) or not any(word in complaint for word in ("sens:", "error:")):
        raise RuntimeError(f"sens ended with {code} and said {complaint[-300:]!r}")
    raise CommandError(complaint[-2000:], out.getvalue())


def told_by_run(folder: Path) -> str:
    """Fingerprint a finished run folder, less what is of this machine and minute."""
    result = json.loads((folder / "result.json").read_text())
    kept = {
        name: result.get(name) for name in ("figures", "figures_in_float32", "storage", "epochs", "matrix", "memory")
    }
    for figures in (kept["figures"], kept["figures_in_float32"] or {}):
        figures.pop("size/peak_bytes", None)
    history = folder / "history.csv"
    rows = [row.rpartition(",")[0] for row in history.read_text().splitlines()] if history.exists() else []
    weights = [path.read_bytes() for path in sorted(folder.glob("[el]*.safetensors"))]
    return digest(repr(kept), rows, *weights, (folder / "config.yaml").read_bytes())


# Code that nobody may run --------------------------------------------------------------------------------------------


def plant_canary(folder: Path) -> Callable[[], bool]:
    """Put a module into the current folder of this process; returns a function that tells whether it was imported."""
    mark = folder / "canary-ran"
    text = f"from pathlib import Path\n\ndef run(*a, **k):\n    return None\n\nPath({str(mark)!r}).touch()\n"
    (folder / "attack_canary.py").write_text(text)
    os.chdir(folder)
    sys.path.insert(0, "")

    def ran() -> bool:
        found = mark.exists()
        mark.unlink(missing_ok=True)
        sys.modules.pop("attack_canary", None)
        return found

    ran()
    return ran
