"""Train, search and score in one of several processes; write the results for the test to compare."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.networks.state import all_tensors
from structured_ensembles.storage.files import write_tensors


def members(count: int) -> list[nn.Module]:
    found = []
    for number in range(count):
        torch.manual_seed(number)
        width = 6 + 2 * number
        found.append(
            nn.Sequential(
                nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
                nn.Linear(36 * width, 10),
            )
        )  # fmt: skip
    return found


def some_digits() -> se.Data:
    data = se.load_data("digits")
    return se.Data.from_arrays(data.train.inputs[:420], data.train.targets[:420], classes=10, name="some")


def some_values() -> se.Data:
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, x.sum(1, keepdim=True) / 10**0.5 + 2)


class Dying(nn.Module):
    """Fail in process 1 in the third epoch, once."""

    def __init__(self, inner: nn.Module, folder: str) -> None:
        super().__init__()
        self.inner, self.mark, self.passes = inner, Path(folder) / "died", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes > 2 * 6 and os.environ.get("RANK") == "1" and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("the disk of process 1 is full")
        return self.inner(x)


class Caching(nn.Module):
    """Keep a buffer that is set in training, as large as the largest batch."""

    cache: torch.Tensor | None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and (self.cache is None or len(self.cache) < len(x)):
            self.cache = torch.arange(float(len(x)))
        return self.inner(x)


def work(folder: str, whats: str, count: str = "2") -> None:
    """Do each of the named things in this process, in order, and write its results."""
    for what in whats.split():
        work_at(folder, what, count)


def work_at(folder: str, what: str, count: str) -> None:
    """Train, fail once, or search, and write the tensors to `what-rank.safetensors`."""
    from structured_ensembles.common.processes import rank

    out, data = Path(folder) / f"{what}-{rank()}.safetensors", some_digits()
    if what in ("train", "taught", "die", "tiny"):
        networks = members(int(count))
        if what == "die":
            networks = [Dying(network, folder) for network in networks]
        ensemble = se.Ensemble(networks)
        size = 3 if what == "tiny" else 64
        recipe = se.Recipe(epochs=5, batch_size=size, rate=0.05, augmentation="crop", patience=2)
        teacher = se.Teacher(se.Ensemble(members(4)[2:]), share=0.7) if what == "taught" else None
        checkpoint = Path(folder) / "checkpoint.safetensors"
        history = se.train(ensemble, data, recipe, "cpu", seed=3, checkpoint=checkpoint, teacher=teacher, quiet=True)
        write_tensors(out, ensemble.state_dict(), {"rows": str(len(history.rows))})
    elif what == "caching":
        ensemble = se.Ensemble([Caching(network) for network in members(int(count))])
        se.train(ensemble, data, se.Recipe(epochs=2, batch_size=65), "cpu", quiet=True)
        write_tensors(out, all_tensors(ensemble.members), {})
    elif what == "regression":  # each process starts from weights of its own, and would choose units of its own
        torch.manual_seed((0, 2)[rank()])
        networks = [
            nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 1)) for _ in range(int(count))
        ]
        ensemble = se.Ensemble(networks)
        se.train(ensemble, some_values(), se.Recipe.named("regression", epochs=30), "cpu", quiet=True)
        write_tensors(out, ensemble.state_dict(), {})
    else:
        torch.manual_seed(0)
        if what == "none":  # a last batch that leaves the second process nothing
            data = se.Data.from_arrays(data.train.inputs[:130], data.train.targets[:130], classes=10, validation=0.0)
        model = se.zoo.lenet5(num_classes=10, in_channels=1)
        graph = se.trace(model, data.example())
        scales = se.Scales.draw(graph, 3)
        if what != "saliency":
            diversity = "mmd" if what == "search" else None
            scales = se.learn_scales(model, graph, data, 3, diversity=diversity, epochs=2, device="cpu", quiet=True)
        scores = se.saliency(model, graph, scales, data, device="cpu", quiet=True)
        subnets = se.select(graph, scores, prune=0.5)
        found = {f"{number}.{name}": value for number, own in enumerate(scores) for name, value in own.values.items()}
        write_tensors(out, {**found, **_kept(subnets)}, {})


def threads_of_groups() -> list[str]:
    """List the running threads of process groups (Linux only): while Python ends, they may abort the process."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]


def no_thread_is_left() -> bool:
    """Wait up to 5 s for the threads of process groups to end: a joined thread is listed a moment longer."""
    end = time.monotonic() + 5
    while threads_of_groups() and time.monotonic() < end:
        time.sleep(0.01)
    return not threads_of_groups()


def _kept(subnets: list[se.Subnet]) -> dict[str, torch.Tensor]:
    return {
        f"kept.{number}.{name}": torch.tensor(kept)
        for number, subnet in enumerate(subnets)
        for name, kept in subnet.kept.items()
    }
