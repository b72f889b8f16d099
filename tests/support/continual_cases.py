"""Small backbones and tasks that continual learners are tested on."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.continual import Learner, Task

SHORT = {"epochs": 2, "batch_size": 16, "quiet": True}
LONG = {**SHORT, "epochs": 20}


class Plain(nn.Module):
    """Apply two convolutions with biases and a mean over space, without batch norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))


class Normalized(nn.Module):
    """Put batch norms between convolutions, with an activation that is not 0 at 0, and flatten."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.Sigmoid(),
            nn.Conv2d(width, width + 2, 3, stride=2),
            nn.BatchNorm2d(width + 2, momentum=None),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear((width + 2) * 4, 10, bias=False),
            nn.BatchNorm1d(10, affine=False),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """Add blocks to a residual stream, whose channels reach the head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, width, 3, padding=1),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.relu(x).mean((2, 3))


BACKBONES = {"plain": Plain, "normalized": Normalized, "residual": Residual}


def make_backbone(name: str = "plain", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BACKBONES[name]()


def make_tasks(tasks: int = 4, classes: int = 2, per_class: int = 16, size: int = 7, seed: int = 0) -> list[Task]:
    """Make tasks of noisy images, (1, size, size) of bytes, around one pattern per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(tasks * classes).repeat(per_class)
    patterns = 255 * torch.rand(tasks * classes, 1, size, size, generator=generator)
    noise = 60 * torch.randn(len(labels), 1, size, size, generator=generator)
    pixels = (patterns[labels] + noise).clamp(0, 255).to(torch.uint8)
    test = slice(0, len(labels) // 4)
    data = se.Data.from_arrays(pixels, labels, test=(pixels[test], labels[test]), validation=0.2)
    return se.continual.split_tasks(data, tasks)


def inputs_of(task: Task) -> Tensor:
    split = task.data.split("test")
    return split.inputs[split.index]


def logits_of(learner: Learner, tasks: list[Task]) -> dict[int, Tensor]:
    """Return the logits of every learned task on its test images, by number."""
    return {number: learner.logits(inputs_of(tasks[number]), task=number) for number in learner.learned}


def learn_and_check(learner: Learner, tasks: list[Task]) -> dict[int, Tensor]:
    """Learn the tasks that are left; after each, the logits of all earlier ones must be bit-identical."""
    for task in tasks:
        if task.number in learner.learned:
            continue
        before = logits_of(learner, tasks)
        learner.learn(task)
        now = logits_of(learner, tasks)
        for number, logits in before.items():
            assert torch.equal(logits, now[number]), f"task {number} changed with task {task.number}"
    return logits_of(learner, tasks)


class Digits(nn.Module):
    """Apply three normalised convolutions of 32, 64 and 128 channels to 8×8 images: the backbone for split digits."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 128)
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            for inputs, outputs in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, widths[1:]))
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return F.relu(self.norms[-1](self.convs[-1](x))).mean((2, 3))
