"""Predictions replayed from CUDA graphs equal those of plain calls."""

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda import prediction_graphs
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.networks.copying import clone_model
from tests.support.kernel_checks import recorded_launches
from tests.support.networks import Viewing, pruned, small_networks

pytestmark = pytest.mark.cuda


def check_replayed(ensemble: se.Ensemble, x: torch.Tensor) -> None:
    """Check that a graph is captured and gives the outputs of the plain pass."""
    with torch.enable_grad():
        expected = ensemble(x).detach()
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(ensemble(x), expected, rtol=1e-2, atol=1e-2)
    assert len(ensemble.replays.graphs) == 1


@pytest.mark.filterwarnings("error")
def test_network_that_flattens_by_view_trains_and_predicts_in_graphs() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (600, 3, 8, 8), dtype=torch.uint8)
    data = se.Data.from_arrays(images, torch.arange(600) % 10)
    ensemble = se.Ensemble([Viewing(3), Viewing(3)])
    history = se.train(ensemble, data, se.Recipe(epochs=2), execution=se.Execution(engine="graph"), quiet=True)
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


def test_replayed_predictions_follow_changed_weights_and_modes() -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble(small_networks(3, dropout=0.5)).cuda().eval()
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
def test_batch_ensemble_and_dropout_networks_can_be_captured(kind: str, training: bool, without_tf32: None) -> None:
    torch.manual_seed(0)
    model, example = se.zoo.lenet5(in_channels=1), torch.randn(13, 1, 28, 28)
    layers = find_called_layers(model, example)
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


def members_with_statistics(count: int) -> se.Ensemble:
    """Make an ensemble of pruned ResNet20s whose running statistics are those of some images."""
    networks = []
    for seed in range(count):
        network = pruned(0.5).cuda().train()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            for _ in range(3):
                network(torch.randn(64, 3, 32, 32, device="cuda"))
        networks.append(network)
    return se.Ensemble(networks).cuda().eval()


def exact_outputs(ensemble: se.Ensemble, x: torch.Tensor) -> torch.Tensor:
    """Compute the members' outputs in float64."""
    with torch.no_grad():
        return torch.stack([clone_model(member).double().eval()(x.double()) for member in ensemble.members])


@pytest.mark.parametrize("samples", [1, 50, 256])
def test_compiled_predictions_are_as_exact_as_those_of_the_networks(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 6)
    ensemble = members_with_statistics(5)
    x = torch.randn(samples, 3, 32, 32, device="cuda")
    exact = exact_outputs(ensemble, x)
    with torch.enable_grad():
        by_networks = ensemble(x).detach()
    with recorded_launches() as names, torch.inference_mode():
        for _ in range(7):
            outputs = ensemble(x)
    convolutions = [name for name in names if name.startswith("convolve")]
    # Two passes that warm up, and one that is captured.
    assert len(convolutions) == 3 * 19
    # cuDNN may use TF32, as our kernels do, but for few images it also has others.
    allowed = 3 * (by_networks.double() - exact).abs().max() + 5e-3 * exact.abs().max()
    assert (outputs.double() - exact).abs().max() <= allowed
    with torch.no_grad():  # in place, which a graph must see
        for tensor in (*ensemble.members[0].parameters(), *ensemble.members[1].buffers()):
            tensor.mul_(2)
        exact = exact_outputs(ensemble, x)
        assert (ensemble(x).double() - exact).abs().max() <= 0.01 * exact.abs().max()


def test_compiled_predictions_stay_right_while_memory_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 6)
    ensemble = members_with_statistics(3)
    x = torch.randn(40, 3, 32, 32, device="cuda")
    with torch.no_grad():
        for _ in range(7):
            expected = ensemble(x)
        # Tensors of all sizes, which the allocator would place where freed weights and tables were.
        garbage = [torch.full((size,), -1, device="cuda") for size in 2 ** torch.arange(4, 19) for _ in range(60)]
        torch.testing.assert_close(ensemble(x), expected, rtol=0, atol=0)
    del garbage


def test_compiled_predictions_under_autocast_are_near_those_of_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 6)
    ensemble = members_with_statistics(3)
    x = torch.randn(100, 3, 32, 32, device="cuda")
    exact = exact_outputs(ensemble, x)
    with torch.autocast("cuda", torch.bfloat16):
        with torch.enable_grad():
            by_networks = ensemble(x).detach()
        with recorded_launches() as names, torch.no_grad():
            for _ in range(7):
                outputs = ensemble(x)
    assert len([name for name in names if name.startswith("convolve")]) == 3 * 19
    assert outputs.dtype == by_networks.dtype == torch.bfloat16
    allowed = 2 * (by_networks.double() - exact).abs().max() + 0.01 * exact.abs().max()
    assert (outputs.double() - exact).abs().max() <= allowed


def test_float32_without_tf32_is_not_compiled(without_tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 6)
    ensemble = members_with_statistics(2)
    x = torch.randn(20, 3, 32, 32, device="cuda")
    exact = exact_outputs(ensemble, x)
    with recorded_launches() as names, torch.no_grad():
        for _ in range(8):
            torch.testing.assert_close(ensemble(x).double(), exact, rtol=1e-4, atol=1e-4)
    assert names == []


@pytest.mark.parametrize("kind", ["tile", "dropout"])
def test_networks_of_several_members_are_replayed(kind: str, without_tf32: None) -> None:
    torch.manual_seed(0)
    model, x = se.zoo.resnet20(), torch.randn(100, 3, 32, 32)
    layers = find_called_layers(model, x[:2])
    network = (
        DropoutNetwork(model, layers.hidden, 5) if kind == "dropout" else BatchEnsembleNetwork(model, layers.all, 5)
    )
    ensemble = se.Ensemble([network]).cuda().eval()
    check_replayed(ensemble, x.cuda())
    other = torch.randn(100, 3, 32, 32, device="cuda")
    with torch.enable_grad():
        expected = ensemble(other).detach()
    with torch.no_grad():
        torch.testing.assert_close(ensemble(other), expected, rtol=1e-2, atol=1e-2)
