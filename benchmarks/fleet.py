"""Measure a training step of N networks: ours, and every other way we know.

    python benchmarks/fleet.py [--models resnet20 vgg11 resnet32] [--members 1 5 15] [--compiled 5] [--streams 1 2 3]
                               [--rounds 3] [--skip vmap grouped] [--json FILE]

Networks have lost half of the inner channels of their blocks (structured members at prune=0.5). A step is forward,
backward, SGD with momentum, at batch 128. Ours also draws, crops, flips and normalises the batch, and is timed over
whole epochs of `train`, drawing their order included; the others get a batch that lies ready on the device. All times
are of one run; the column "of one" is the ratio to one full network in plain PyTorch (float32, eager). With several
rounds all ways take turns, and the median counts: on a machine whose speed changes, only that tells ways apart.

    one full network, eager    what a user has: plain PyTorch
    eager loop                 the members one after the other, float32
    eager loop, bfloat16       the same with autocast and channels last
    vmap                       torch.func: stack_module_state and vmap over the members (equal widths only)
    grouped                    one network with grouped convolutions (equal widths only; the zero channels of ResNet's
                               shortcut are not regrouped: the same cost, not the same function)
    Lightning, one network     its Trainer on one full network, batches from a DataLoader in memory
    ours, loop, one by one     `train` called for each network (not on a GPU)
    ours, loop, bfloat16       not on a GPU; fast where the processor has AVX512-BF16 or AMX
    ours, loop | graph | graph, compiled
    ours, graph, S streams     no more than S members at a time: less memory, more time

The floor is what the bytes take at the bandwidth that a copy reaches in the same run, in bfloat16: the output of every
convolution is written and read 14 times in a step without fusion across kernels (forward: convolution, two passes and a
write of batch norm, the next convolution; backward: twice that, and the sums).
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import structured_ensembles as se
from recording import arguments_of, from_scratch, milliseconds, record, wait
from structured_ensembles.common.tables import text_table

PASSES = 14
SIZES = {"resnet20": (32, 10), "vgg11": (32, 10), "resnet32": (64, 200)}  # image size and classes


def main() -> None:
    """Compare all ways for every model and number of members, and print the tables."""
    arguments = arguments_of(
        __doc__, models=list(SIZES), members=[1, 5, 15], compiled=[5], streams=[1, 2, 3], batch=128, steps=0, prune=0.5,
        rounds=1, skip=[""],
    )  # fmt: skip
    arguments.steps = arguments.steps or (60 if arguments.device.startswith("cuda") else 3)
    all_rows = []
    bandwidth = measure_bandwidth(arguments.device)
    if arguments.device.startswith("cuda"):
        from_scratch()  # or smaller tensors would be placed in this memory
    for model in arguments.models:
        full_ms = None
        for members in arguments.members:
            rows = compare(arguments, model, members, bandwidth)
            full_ms = full_ms or {row["name"]: row["ms"] for row in rows}.get("one full network, eager")
            for row in rows:
                row["of_one"] = row["ms"] / full_ms if row.get("ms") and full_ms else None
            all_rows += rows
            print(f"\n{model}, N = {members}, batch {arguments.batch}")
            print(
                text_table(("", "ms", "of one", "start s", "peak MiB"), [format_row(row) for row in rows]), flush=True
            )
            record(arguments, all_rows)  # after every table, in case of an interrupt


def format_row(row: dict) -> tuple[str, ...]:
    """Format a row of the table."""
    if row.get("ms") is None:
        return (row["name"], "–", "–", "–", row.get("error", ""))
    ratio = f"{row['of_one']:.2f}" if row["of_one"] else "–"
    return (row["name"], f"{row['ms']:.2f}", ratio, f"{row.get('start', 0):.1f}", f"{row.get('MiB', 0):.0f}")


def compare(arguments: argparse.Namespace, model: str, members: int, bandwidth: float) -> list[dict]:
    """Measure all ways to train `members` networks; return a row for each, and for the floor."""
    size, classes = SIZES[model]
    device = arguments.device
    torch.manual_seed(0)
    base = getattr(se.zoo, model)(num_classes=classes)
    data = synthetic(arguments.steps * arguments.batch, size, classes)
    graph = se.trace(base, data.example())
    subnets = se.select(graph, prune=arguments.prune, selection="random", members=members)

    def make_members() -> list[nn.Module]:
        return [se.extract(base, graph, subnet) for subnet in subnets]

    batch = (
        torch.randn(arguments.batch, 3, size, size, device=device),
        torch.arange(arguments.batch, device=device) % classes,
    )
    ways: dict[str, Callable[[], dict]] = {
        "one full network, eager": lambda: plain([copy.deepcopy(base)], batch, arguments),
        "eager loop": lambda: plain(make_members(), batch, arguments),
        "eager loop, bfloat16": lambda: plain(make_members(), batch, arguments, halved=True),
        "vmap": lambda: vectorized(make_members(), batch, arguments),
        "grouped": lambda: grouped(make_members(), batch, arguments),
        "Lightning, one network": lambda: lightning(copy.deepcopy(base), size, classes, arguments),
        "ours, loop": lambda: ours(make_members(), data, arguments, engine="loop"),
    }
    if device.startswith("cpu"):
        ways["ours, loop, one by one"] = lambda: separate(make_members(), data, arguments)
        ways["ours, loop, bfloat16"] = lambda: ours(
            make_members(), data, arguments, engine="loop", precision="bfloat16"
        )
    if device.startswith("cuda"):
        ways["ours, graph"] = lambda: ours(make_members(), data, arguments, engine="graph")
        for streams in (count for count in arguments.streams if count < members):
            ways[f"ours, graph, {streams} stream{'s' * (streams > 1)}"] = lambda streams=streams: ours(
                make_members(), data, arguments, engine="graph", streams=streams
            )
        if members in arguments.compiled:
            ways["ours, graph, compiled"] = lambda: ours(make_members(), data, arguments, engine="graph", compile=True)
    if members > 1:
        del ways["Lightning, one network"]
    ways = {name: way for name, way in ways.items() if name not in arguments.skip}  # some need too much memory
    rounds = [{name: attempt(way, device) for name, way in ways.items()} for _ in range(arguments.rounds)]
    rows = [
        {"model": model, "members": members, "name": name, **median_round([figures[name] for figures in rounds])}
        for name in ways
    ]
    floor = (
        PASSES
        * 2
        * members
        * count_activations(make_members()[0], batch[0][:1].cpu())
        * arguments.batch
        / bandwidth
        * 1000
    )
    rows.append({"model": model, "members": members, "name": "floor: bytes / bandwidth", "ms": floor})
    return rows


def attempt(way: Callable[[], dict], device: str) -> dict:
    """Measure one way, with its peak reserved GPU memory; on an error, return the error.

    Allocated memory, also recorded, is less: streams do not share memory, so that memory freed by one stays reserved.
    """
    cuda = device.startswith("cuda")
    before = from_scratch() if cuda else 0
    try:
        figures = way()
    except Exception as error:
        return {"ms": None, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    if cuda:
        figures["MiB"] = (torch.cuda.max_memory_reserved() - before) / 2**20
        figures["allocated_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return figures


def median_round(rounds: list[dict]) -> dict:
    """Return the round of median time."""
    return sorted(rounds, key=lambda figures: figures["ms"] or math.inf)[len(rounds) // 2]


def synthetic(samples: int, size: int, classes: int) -> se.Data:
    """Make a data set of random images."""
    images = torch.randint(0, 256, (samples, 3, size, size), dtype=torch.uint8)
    return se.Data.from_arrays(images, torch.arange(samples) % classes, validation=0.0, classes=classes)


def ours(networks: list[nn.Module], data: se.Data, arguments: argparse.Namespace, **settings: object) -> dict:
    """Time full epochs of `train`; the first one, with the one-time set-up, gives `start`."""
    epochs = 3 if settings.get("engine") == "loop" else 4
    # A low rate, since a member that diverges would stop.
    recipe = se.Recipe(epochs=epochs, batch_size=arguments.batch, rate=1e-4, warmup=0)
    execution = se.Execution(**settings)
    history = se.train(se.Ensemble(networks), data, recipe, arguments.device, execution=execution, quiet=True)
    seconds = [row["seconds"] for row in history.of(0)]
    usual = statistics.median(seconds[1:])
    return {"ms": 1000 * usual / arguments.steps, "start": seconds[0] - usual, "fallbacks": history.fallbacks}


def separate(networks: list[nn.Module], data: se.Data, arguments: argparse.Namespace) -> dict:
    """Train each network in a separate run: a fleet saves the work done once per batch."""
    runs = [ours([network], data, arguments, engine="loop") for network in networks]
    return {name: sum(run[name] for run in runs) for name in ("ms", "start")}


def plain(networks: list[nn.Module], batch: tuple, arguments: argparse.Namespace, halved: bool = False) -> dict:
    """Time an eager loop over the networks. halved: bfloat16 and channels last."""
    device, (x, y) = arguments.device, batch
    networks = [network.to(device) for network in networks]
    if halved:
        networks = [network.to(memory_format=torch.channels_last) for network in networks]
        x = x.to(memory_format=torch.channels_last)
    optimizers = [torch.optim.SGD(network.parameters(), 0.01, 0.9) for network in networks]

    def step() -> None:
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=halved):
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()

    return {"ms": milliseconds(step, device, max(arguments.steps // 4, 1))}


def vectorized(networks: list[nn.Module], batch: tuple, arguments: argparse.Namespace) -> dict:
    """Time torch.func's vmap over the stacked networks."""
    device, (x, y) = arguments.device, batch
    networks = [network.to(device) for network in networks]
    parameters, buffers = stack_module_state(networks)
    skeleton = copy.deepcopy(networks[0]).to("meta")
    leaves = list(parameters.values())
    optimizer = torch.optim.SGD(leaves, 0.01, 0.9)

    def loss(weights: dict, statistics: dict) -> Tensor:
        return F.cross_entropy(functional_call(skeleton, (weights, statistics), (x,)), y)

    all_gradients = vmap(grad_and_value(loss), randomness="different")

    def step() -> None:
        gradients, _ = all_gradients({name: leaf.detach() for name, leaf in parameters.items()}, buffers)
        for name, leaf in parameters.items():
            leaf.grad = gradients[name]
        optimizer.step()

    return {"ms": milliseconds(step, device, max(arguments.steps // 4, 1))}


class GroupedLinear(nn.Module):
    """N linear layers side by side, from (batch, N * inputs) to (batch, N * outputs)."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))
        self.bias = None
        if layers[0].bias is not None:
            self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.bmm(x.unflatten(1, (len(self.weight), -1)).transpose(0, 1), self.weight)
        return (rows if self.bias is None else rows + self.bias[:, None]).transpose(0, 1).flatten(1)


def grouped(networks: list[nn.Module], batch: tuple, arguments: argparse.Namespace) -> dict:
    """Time one network with grouped convolutions that holds all networks."""
    (x, y), number = batch, len(networks)
    grouped_network = copy.deepcopy(networks[0])
    for name, module in list(grouped_network.named_modules()):
        if isinstance(module, nn.Conv2d):
            layer = nn.Conv2d(
                number * module.in_channels, number * module.out_channels, module.kernel_size, module.stride,
                module.padding, groups=number, bias=module.bias is not None,
            )  # fmt: skip
        elif isinstance(module, nn.BatchNorm2d):
            layer = nn.BatchNorm2d(number * module.num_features)
        elif isinstance(module, nn.Linear):
            layer = GroupedLinear([network.get_submodule(name) for network in networks])
        else:
            continue
        grouped_network.set_submodule(name, layer)
    grouped_network.to(arguments.device)
    optimizer = torch.optim.SGD(grouped_network.parameters(), 0.01, 0.9)
    inputs, targets = x.repeat(1, number, 1, 1), y.repeat_interleave(number)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(grouped_network(inputs).unflatten(1, (number, -1)).flatten(0, 1), targets).backward()
        optimizer.step()

    return {"ms": milliseconds(step, arguments.device, max(arguments.steps // 4, 1))}


def lightning(network: nn.Module, size: int, classes: int, arguments: argparse.Namespace) -> dict:
    """Time one network in Lightning's Trainer."""
    import logging
    import warnings

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.marks = network, []

        def training_step(self, batch: tuple, number: int) -> Tensor:
            if number in (arguments.steps // 3, arguments.steps - 1):
                wait(arguments.device)
                self.marks.append((number, time.perf_counter()))
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01, 0.9)

    samples = arguments.steps * arguments.batch
    dataset = torch.utils.data.TensorDataset(torch.randn(samples, 3, size, size), torch.arange(samples) % classes)
    loader = torch.utils.data.DataLoader(dataset, arguments.batch, shuffle=True)
    accelerator = "gpu" if arguments.device.startswith("cuda") else "cpu"
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Module()
    lightning.Trainer(max_epochs=1, accelerator=accelerator, devices=1, **quiet).fit(module, loader)
    (first, start), (last, end) = module.marks
    return {"ms": 1000 * (end - start) / (last - first)}


def count_activations(network: nn.Module, x: Tensor) -> int:
    """Count the activations of all convolutions for one image."""
    counts = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _module, _inputs, output: counts.append(output.numel()))
    with torch.no_grad():
        network.cpu().eval()(x)
    return sum(counts)


def measure_bandwidth(device: str) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.empty(2**28 if device.startswith("cuda") else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source), device, 10) / 1000)


if __name__ == "__main__":
    main()
