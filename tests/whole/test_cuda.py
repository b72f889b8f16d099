"""The walk on a GPU gives what it gives on the CPU (CI has none; run this file where there is one)."""

import gc
import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda import batch_norm, convolution
from structured_ensembles.cuda.prediction_graphs import WORTHWHILE
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from tests.support.fused_norms import CASES, check
from tests.support.kernel_checks import check_batch_norm, check_channels_of_zeros, check_convolution, check_drawn_batch
from tests.support.networks import Sparse, Viewing
from tests.support.user_models import (
    IMAGES,
    LABELS,
    ROWS,
    SEQUENCES,
    Auxiliary,
    Frozen,
    Gained,
    Renamed,
    TimeFirst,
    Tokens,
    TwoViews,
    mlp,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_walk_is_the_same_on_a_gpu() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.resnet20(in_channels=1)
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=3, epochs=1, device="cpu")
    on_cpu = se.saliency(model, graph, scales, data, device="cpu")
    on_gpu = model.cuda()
    assert se.trace(on_gpu, data.example().cuda()).groups == graph.groups
    assert se.trace(on_gpu, data.example()).axes == graph.axes
    scores = se.saliency(on_gpu, graph, scales, data)
    for own, other in zip(scores, on_cpu, strict=True):
        for name, values in own.values.items():
            torch.testing.assert_close(values, other.values[name], rtol=5e-3, atol=1e-5)
    learned = se.learn_scales(on_gpu, graph, data, members=3, epochs=1)
    for name, values in learned.vectors.items():
        torch.testing.assert_close(values, scales.vectors[name], rtol=0, atol=5e-3)  # a handful of Adam steps of 1e-3
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_training_and_storage_on_a_gpu(tmp_path: Path) -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.structured_ensemble(
        se.zoo.resnet20(in_channels=1), data, members=3, recipe=se.Recipe(epochs=8), search_epochs=2, quiet=True
    )
    assert next(ensemble.parameters()).is_cuda
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.9
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = se.Ensemble.load(tmp_path / "ensemble.safetensors")
    x = data.test.inputs[:64]
    torch.testing.assert_close(loaded.predict_proba(x), ensemble.predict_proba(x), rtol=1e-2, atol=1e-3)


def networks(count: int = 3, dropout: float = 0.0) -> list[nn.Module]:
    """Of different widths."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        width = 8 + 4 * number
        found.append(
            nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Flatten(),
                nn.Linear(64 * width, 10),
            )
        )
    return found


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_graph_and_loop_agree_over_a_hundred_steps(optimizer: str) -> None:
    data = se.load_data("digits")
    recipe = se.Recipe(
        epochs=10, precision="float32", rate=0.01, optimizer=optimizer, augmentation="crop", batch_size=128
    )
    losses = {}
    for engine in ("graph", "loop"):
        ensemble = se.Ensemble(networks())
        history = se.train(ensemble, data, se.Recipe(**{**vars(recipe), "engine": engine}), quiet=True)
        losses[engine] = [row["loss"] for row in history.rows]
    assert data.num_batches("train", 128) * 10 >= 100
    assert losses["graph"] == pytest.approx(losses["loop"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_member_of_a_graph_is_the_network_trained_alone(dropout: float) -> None:
    data = se.load_data("digits")
    recipe = se.Recipe(epochs=4, rate=0.02, patience=1)
    fleet = se.Ensemble(networks(dropout=dropout))
    history = se.train(fleet, data, recipe, seed=3, quiet=True)
    for number, network in enumerate(networks(dropout=dropout)):
        alone = se.train(se.Ensemble([network]), data, recipe, seed=3, numbers=[number], quiet=True)
        assert [row["loss"] for row in alone.rows] == pytest.approx(
            [row["loss"] for row in history.of(number)], rel=1e-3
        )
    again = se.train(se.Ensemble(networks(dropout=dropout)), data, recipe, seed=3, quiet=True)
    assert [row["loss"] for row in again.rows] == [row["loss"] for row in history.rows]


def memory_of(data: se.Data, members: int, **how: object) -> float:
    """Bytes that training takes from the GPU at its peak, besides what was taken before."""
    ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(members)])
    before = from_scratch()
    se.train(ensemble, data, se.Recipe(epochs=2, batch_size=1024, **how), quiet=True)
    return torch.cuda.max_memory_reserved() - before


def from_scratch() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def test_training_leaves_no_memory_behind() -> None:
    data = se.load_data("digits")
    memory_of(data, 3)  # what is done once
    from_scratch()
    before = torch.cuda.memory_reserved()
    memory_of(data, 3)
    left = torch.cuda.memory_allocated()
    assert left - from_scratch() < 80 * 2**20  # cuBLAS's, for the stream of the caller
    assert torch.cuda.memory_reserved() - before < 25 * 2**20  # a segment that is not quite empty


def test_one_stream_takes_the_memory_of_the_loop() -> None:
    data = se.load_data("digits")
    loop, one, all_five = (memory_of(data, 5, **how) for how in ({"engine": "loop"}, {"streams": 1}, {}))
    assert one <= 1.3 * loop
    assert one < 0.5 * all_five


def test_all_streams_take_the_living_tensors_of_the_loop() -> None:
    """By `max_memory_allocated`, which counts what a graph holds only while it is captured."""
    data, living = se.load_data("digits"), []
    for how in ({"engine": "loop"}, {}):
        memory_of(data, 5, **how)
        living.append(torch.cuda.max_memory_allocated())
    assert living[1] <= 1.3 * living[0]


def test_fewer_members_at_a_time_if_memory_is_short() -> None:
    def history() -> se.History:
        torch.manual_seed(0)
        ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(5)])
        return se.train(ensemble, data, recipe, quiet=True)

    data, recipe = se.load_data("digits"), se.Recipe(epochs=2, batch_size=1024)
    all_five, one = memory_of(data, 5), memory_of(data, 5, streams=1)
    expected = [row["loss"] for row in history().rows]
    from_scratch()
    enough = torch.cuda.memory_reserved() + one + 0.7 * (all_five - one)  # three fit
    torch.cuda.set_per_process_memory_fraction(enough / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = history()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "not enough memory for 5 members at a time" in found.fallbacks[0]
    assert found.engine == "graph"
    assert [row["loss"] for row in found.rows] == pytest.approx(expected, rel=1e-3)


def test_streams_change_nothing_but_the_memory() -> None:
    data = se.load_data("digits")
    losses = []
    for streams in (None, 2, 1):
        history = se.train(se.Ensemble(networks()), data, se.Recipe(epochs=2, rate=0.02, streams=streams), quiet=True)
        losses.append([row["loss"] for row in history.rows])
    assert losses[0] == losses[1] == losses[2]


class Unkind(nn.Module):
    """Something that shows only in the capture itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a graph")
        return self.inner(x)


def test_a_capture_that_breaks_off_leaves_all_in_order() -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble([Unkind(network) for network in networks(2, dropout=0.3)])
    history = se.train(ensemble, data, se.Recipe(epochs=2, rate=0.02), quiet=True)
    assert "training goes on without a CUDA graph" in history.fallbacks[-1]
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")
    again = se.train(se.Ensemble(networks(2, dropout=0.3)), data, se.Recipe(epochs=2, rate=0.02), quiet=True)
    assert again.rows[-1]["loss"] < again.rows[0]["loss"]


class Impossible(nn.Module):
    """What a graph cannot hold: the host has a part in it."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = inner, how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x)
        if self.how == "waits":
            return outputs * (1.0 if float(outputs.detach().sum()) != 0.5 else 2.0)
        if self.how == "counts":
            self.calls += 1
            return outputs
        return outputs * (1 + 0.01 * random.random())


@pytest.mark.parametrize("how", ["waits", "counts", "draws"])
def test_what_cannot_be_captured_trains_in_the_loop(how: str) -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble([Impossible(network, how) for network in networks(2, dropout=0.3)])
    history = se.train(ensemble, data, se.Recipe(epochs=3, rate=0.02), quiet=True)
    assert "training goes on without a CUDA graph" in history.fallbacks[-1]
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.GRU(10, 12, batch_first=True), nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.second(self.first(x)[0][:, -1]).relu())
        return result


WORDS = np.random.default_rng(1).integers(0, 50, (96, 9))
USERS: list[tuple[Callable[[], nn.Module], np.ndarray]] = [
    (TimeFirst, SEQUENCES),
    (Recurrent, SEQUENCES),
    (TwoViews, IMAGES),
    (Frozen, IMAGES),
    (Auxiliary, IMAGES),
    (partial(Renamed, twice=False), IMAGES),
    (Gained, ROWS),
    (Tokens, WORDS),
]


@pytest.mark.parametrize(("make", "inputs"), USERS)
def test_networks_as_people_have_them(make: Callable[[], nn.Module], inputs: np.ndarray, tmp_path: Path) -> None:
    """All of it in graphs: the warning that something goes on without one would be an error here."""
    torch.manual_seed(0)
    model = make()
    data = se.Data.from_arrays(inputs, LABELS, test=(inputs, LABELS), ids=inputs is WORDS)
    ensemble = se.structured_ensemble(
        model, data, members=2, prune=0.5, recipe=se.Recipe(epochs=2), search_epochs=1, quiet=True
    )
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = se.Ensemble.load(tmp_path / "ensemble.safetensors", model=make())
    assert next(ensemble.parameters()).is_cuda
    for _ in range(WORTHWHILE + 1):
        found = ensemble.predict_proba(inputs)
    assert ensemble.replays.graphs
    torch.testing.assert_close(found.cpu(), loaded.predict_proba(inputs), rtol=1e-2, atol=2e-3)
    recipe, losses = se.Recipe(epochs=3, batch_size=32, rate=0.02, precision="float32", augmentation="none"), {}
    for device in ("cuda", "cpu"):
        history = se.train(se.Ensemble([deepcopy(model), deepcopy(model)]), data, recipe, device, quiet=True)
        losses[device] = [row["loss"] for row in history.rows]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-2)


def test_bad_input_is_told_as_without_a_gpu() -> None:
    data = se.Data.from_arrays(ROWS, LABELS.astype("f"))
    with pytest.raises(ValueError, match="for classes give whole numbers"):
        se.structured_ensemble(mlp(), data, members=2, prune=0.5, search_epochs=1, quiet=True)
    with pytest.raises(ValueError, match="for classes give whole numbers"):
        se.train(se.Ensemble([mlp()]), data, quiet=True)


def test_a_compiled_fleet_learns_the_same() -> None:
    data = se.load_data("digits")
    losses = []
    for compiled in (False, True):
        ensemble = se.Ensemble(networks())
        history = se.train(ensemble, data, se.Recipe(epochs=3, rate=0.02, compile=compiled), quiet=True)
        losses.append([row["loss"] for row in history.rows])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("shape", [(128, 8, 32, 32), (3, 7, 5, 5), (16, 70, 4, 4), (300, 3, 33, 31), (2, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_batch_norm_is_pytorchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_batch_norm(shape, dtype, "cuda")


def test_our_batch_norm_leaves_channels_of_zeros() -> None:
    check_channels_of_zeros(9, "cuda")


@pytest.mark.parametrize("name", CASES)
def test_nobody_notices_what_is_pending(name: str) -> None:
    following, joined = CASES[name]
    assert check(following, "cuda") == joined


def test_sums_and_relus_of_a_resnet_join_its_normalisations(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []

    def watched(
        x: torch.Tensor, module: nn.BatchNorm2d, other: object = None, relu: bool = False, **more: bool
    ) -> object:
        joined.append((other is not None, relu))
        return plain(x, module, other, relu, **more)

    plain = batch_norm.batch_norm
    monkeypatch.setattr(batch_norm, "batch_norm", watched)
    recipe = se.Recipe(epochs=1, batch_size=1600)
    se.train(se.Ensemble([se.zoo.resnet20(in_channels=1)]), se.load_data("digits"), recipe, quiet=True)
    assert joined == ([(False, True)] + [(False, True), (True, True)] * 9) * 3  # to warm up twice, to be captured


def test_widths_in_eights_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.training import graph_engine as engine

    data = se.load_data("digits")
    torch.manual_seed(0)
    base = se.zoo.resnet20(in_channels=1)
    traced = se.trace(base, data.example())
    subnets = se.select(traced, prune=0.8, selection="random", members=2)
    found, numbers = [], []
    fitting = engine.padded_shapes
    for padded in (True, False):

        def shapes(*arguments: object, padded: bool = padded) -> dict[str, tuple[int, ...]]:
            own = fitting(*arguments) if padded else {}
            numbers.append(len(own))
            return own

        monkeypatch.setattr(engine, "padded_shapes", shapes)
        ensemble = se.Ensemble([se.extract(base, traced, subnet) for subnet in subnets])
        recipe = se.Recipe(epochs=2, warmup=0, rate=1e-3, augmentation="none")  # so low that rounding does not grow
        history = se.train(ensemble, data, recipe, quiet=True)
        found.append([row[name] for row in history.rows for name in ("loss", "validation_loss")])
        assert ensemble.members[0].layer1[0].conv1.weight.shape == (4, 16, 3, 3)
    assert numbers == [18, 0]  # asked once for two members that look alike
    assert found[0] == pytest.approx(found[1], rel=0.02)  # bfloat16, other kernels


@pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((128, 16, 32, 32), 8, 3, 1, 1),
        ((5, 3, 11, 7), 16, 3, 2, 1),
        ((4, 7, 9, 9), 5, 5, 1, 0),
        ((2, 8, 6, 6), 16, 1, 2, 0),
        ((32, 24, 16, 16), 32, 3, 1, 1),
        ((32, 64, 8, 8), 32, 3, 1, 1),
        ((9, 32, 8, 8), 64, 3, 2, 1),
        ((3, 1, 28, 28), 20, 7, 1, 3),
    ],
)
def test_our_convolution_is_pytorchs(
    shape: tuple[int, ...], outputs: int, size: int, stride: int, padding: int
) -> None:
    check_convolution(shape, outputs, size, stride, padding, torch.bfloat16, "cuda")


def test_our_convolution_of_a_part_of_an_image() -> None:
    whole = torch.randn(8, 32, 16, 16, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    layer = nn.Conv2d(16, 8, 3, padding=1, bias=False).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        for x in (*whole.chunk(2, 1), whole[:, :16, ::2, ::2], whole[:, 8:24, 1:, :-1].contiguous()):
            assert convolution.fits(x, layer)
            found, expected = convolution.convolution(x, layer), layer(x)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def check_replayed(ensemble: se.Ensemble, x: torch.Tensor) -> None:
    """That a graph comes up, and gives what the plain pass gives."""
    with torch.enable_grad():
        expected = ensemble(x).detach()
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(ensemble(x), expected, rtol=1e-2, atol=1e-2)
    assert len(ensemble.replays.graphs) == 1


@pytest.mark.filterwarnings("error")
def test_a_network_that_views_trains_and_predicts_in_graphs() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (600, 3, 8, 8), dtype=torch.uint8)
    data = se.Data.from_arrays(images, torch.arange(600) % 10)
    ensemble = se.Ensemble([Viewing(3), Viewing(3)])
    history = se.train(ensemble, data, se.Recipe(epochs=2, engine="graph"), quiet=True)
    assert history.rows[-1]["loss"] < 3
    check_replayed(ensemble, images[:100].cuda())


def test_large_batches_are_predicted_channels_last() -> None:
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.resnet20(), se.zoo.resnet20()]).cuda().eval()
    orders = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            orders.append(x.is_contiguous())
            return x

    for member in ensemble.members:
        member.bn1 = nn.Sequential(member.bn1, Looking()).eval()
    check_replayed(ensemble, torch.rand(100, 3, 32, 32, device="cuda"))
    assert orders[0]  # in order at first
    assert not orders[-1]


def test_prediction_replays_what_it_has_seen() -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble(networks(3, dropout=0.5)).cuda().eval()
    ensemble.adopt(data)
    x = data.test.inputs.cuda().float() / 255
    with torch.enable_grad():
        expected = [ensemble(x[:size]).detach() for size in (64, 1)]
    for _ in range(6):
        with torch.no_grad():
            for size, reference in zip((64, 1), expected, strict=True):
                torch.testing.assert_close(ensemble(x[:size]), reference, rtol=1e-3, atol=1e-3)
    assert len(ensemble.replays.graphs) == 2
    with torch.no_grad():
        before = ensemble(x[:64])
        other = ensemble(x[64:128])  # the same shape: not the earlier result
        assert not torch.equal(before, other)
        # Weights that were changed in place, that moved, and a member in training mode.
        for parameter in ensemble.members[0].parameters():
            parameter.mul_(2)
        changed = ensemble(x[:64])
        assert not torch.allclose(changed[0], before[0])
        assert torch.equal(changed[1:], before[1:])
        for parameter in ensemble.members[1].parameters():
            parameter.data = parameter.data * 3
        moved = ensemble(x[:64])
        assert not torch.allclose(moved[1], before[1])
        ensemble.members[2].train()
        assert not torch.allclose(ensemble(x[:64])[2], before[2])
    with torch.inference_mode():
        ensemble.eval()
        # Its statistics have changed in training mode.
        torch.testing.assert_close(ensemble(x[:64])[:2], moved[:2], rtol=1e-3, atol=1e-3)
    pixels = x[:64].clone().requires_grad_()
    assert torch.autograd.grad(ensemble(pixels).sum(), pixels)[0].abs().sum() > 0


@pytest.mark.parametrize("kind", ["tile", "split", "dropout"])
@pytest.mark.parametrize("training", [False, True])
def test_networks_of_several_members_can_be_captured(kind: str, training: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model, example = se.zoo.lenet5(in_channels=1), torch.randn(13, 1, 28, 28)
    layers = called_layers(model, example)
    network = (
        DropoutNetwork(model, layers.hidden, 5)
        if kind == "dropout"
        else BatchEnsembleNetwork(model, layers.all, 5, kind)
    ).train(training)
    on_cpu = network(example)
    network.cuda()
    x = example.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up, which capture needs
        network(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    network.zero_grad()
    with torch.cuda.graph(graph):
        outputs = network(x)
        outputs.sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert outputs.shape == on_cpu.shape
    assert all(bool(parameter.grad.isfinite().all()) for parameter in network.parameters())
    if not (training and kind == "dropout"):  # the hash drops the same elements everywhere
        torch.testing.assert_close(outputs.cpu(), on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", se.evaluation.CORRUPTIONS)
def test_corruptions_draw_the_same_on_a_gpu(name: str) -> None:
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        on_cpu = se.evaluation.corrupt(images, name, severity, seed=1)
        on_gpu = se.evaluation.corrupt(images.cuda(), name, severity, seed=1)
        assert on_gpu.is_cuda
        # A rounding error may carry a value over a threshold, such as the edge of a drop.
        assert float(((on_gpu.cpu() - on_cpu).abs() > 1e-3).double().mean()) < 0.005


def test_evaluation_on_a_gpu() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=2), quiet=True, device="cpu")
    asked = {"fgsm": [0.1], "corruptions": ["fog", "contrast"], "base": se.zoo.mlp(64)}
    on_cpu = se.evaluate(ensemble, data, **asked)
    on_gpu = se.evaluate(ensemble.cuda(), data, **asked)
    assert on_gpu.keys() == on_cpu.keys()
    for key, value in on_gpu.items():
        if key != "size/peak_bytes":
            assert value == pytest.approx(on_cpu[key], rel=1e-2, abs=1e-2)
    assert on_gpu["size/peak_bytes"] > 0


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
def test_a_batch_drawn_in_one_kernel_is_the_one_drawn_in_many(augmentation: str) -> None:
    check_drawn_batch(augmentation, (3, 32, 32), "cuda")
    check_drawn_batch(augmentation, (1, 11, 7), "cuda")


def test_sparse_gradients_train_in_the_loop() -> None:
    """A fused optimizer, such as a graph needs, does not take them."""
    data, recipe = se.load_data("digits"), se.Recipe(epochs=2, rate=3.0, momentum=0.0, weight_decay=0.0)
    history = se.train(se.Ensemble([Sparse()]), data, recipe, quiet=True)
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
