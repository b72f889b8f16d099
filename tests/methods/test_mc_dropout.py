"""MC-Dropout: the right elements, at the right rate, the same in every call."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chi2
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.compilation import compile_networks, has_hooks
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork, SampledDropout
from tests.support.engines import use_engine
from tests.support.programs import assert_equal, conv, images, norm, operations, results_of, results_of_network
from tests.support.real_data import few_digits


def two_layers(width: int = 200) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, width), nn.Linear(width, 3))


class TwoHeads(nn.Module):
    """End in a sum of two layers whose names hide their order."""

    def __init__(self) -> None:
        super().__init__()
        self.a_head, self.z_head = nn.Linear(6, 4), nn.Linear(6, 4)
        self.last = nn.ModuleDict({"conv": nn.Conv2d(1, 6, 3)})

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.last["conv"](x), inplace=True).mean((2, 3))
        return F.log_softmax(self.z_head(features) + self.a_head(features), dim=-1)


def test_hidden_layers_are_those_that_feed_others() -> None:
    assert find_called_layers(two_layers(), torch.randn(2, 8)).hidden == ("1",)
    layers = find_called_layers(TwoHeads(), torch.randn(2, 1, 5, 5))
    assert (layers.hidden, layers.last) == (("last.conv",), ("z_head", "a_head"))
    resnet = se.zoo.resnet20(in_channels=1)
    layers = find_called_layers(resnet, torch.randn(2, 1, 8, 8))
    convolutions = [name for name, module in resnet.named_modules() if isinstance(module, nn.Conv2d)]
    assert layers.last == ("fc",)
    assert sorted(layers.hidden) == sorted(convolutions)
    fully = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 10, 1), nn.AdaptiveAvgPool2d(1))
    assert find_called_layers(fully, torch.randn(2, 1, 8, 8)).last == ("2",)


def masks(network: DropoutNetwork, x: Tensor, layer: str = "1") -> Tensor:
    """Return which elements after a layer are kept, (members, batch, …)."""
    captured = []
    module = network.network.get_submodule(layer)
    handle = module.sampled_dropout.register_forward_hook(
        lambda _m, inputs, output: captured.append((inputs[0], output))
    )
    network(x)
    handle.remove()
    ((before, after),) = captured
    kept = after != 0
    torch.testing.assert_close(after[kept], before[kept] / (1 - network.probability))
    return kept.unflatten(0, (network.num_members, -1))


@pytest.mark.parametrize("probability", [0.25, 0.5, 0.9])
def test_masks_have_the_rate_and_are_independent(probability: float) -> None:
    network = DropoutNetwork(two_layers(1000), ["1"], 5, probability, seed=4).eval()
    kept = masks(network, torch.randn(40, 8, generator=torch.Generator().manual_seed(0))).double()
    number, rate = kept.numel(), 1 - probability
    spread = (rate * (1 - rate)) ** 0.5
    assert float(kept.mean()) == pytest.approx(rate, abs=4 * spread / number**0.5)
    # Rates per position, per row and per sample scatter as those of independent draws do.
    for dims in ((0, 1), (0, 2), (1, 2)):
        rates = kept.mean(dims)
        each = number / len(rates)
        statistic = float((((rates - rate) / (spread / each**0.5)) ** 2).sum())
        assert 1e-4 < chi2.sf(statistic, len(rates)) < 1 - 1e-4
    flat = kept.flatten(0, 1)  # any two masks, of samples or rows, agree as often as independent ones
    centred = (flat - rate) / spread
    correlation = (centred @ centred.T / flat.shape[1])[~torch.eye(len(flat), dtype=torch.bool)]
    assert float(correlation.abs().max()) < 6 / flat.shape[1] ** 0.5
    assert float((correlation**2).mean()) == pytest.approx(1 / flat.shape[1], rel=0.1)
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean()
    assert abs(float(neighbours)) < 4 / number**0.5


def test_prediction_does_not_depend_on_the_batch() -> None:
    ensemble = se.Ensemble([DropoutNetwork(two_layers(), ["1"], 5)])
    x = torch.randn(30, 8)
    before = torch.get_rng_state()
    logits = ensemble.logits(x)
    assert logits.shape == (5, 30, 3)
    assert torch.equal(logits, ensemble.logits(x))
    torch.testing.assert_close(ensemble.logits(x, batch_size=7), logits)
    torch.testing.assert_close(ensemble.logits(x.flip(0)).flip(1), logits)
    torch.testing.assert_close(ensemble.logits(x[11:12]), logits[:, 11:12])
    assert torch.equal(torch.get_rng_state(), before)
    for index in range(5):
        for other in range(index):
            assert not torch.isclose(logits[index], logits[other]).any(-1).all()
    reseeded = se.Ensemble([DropoutNetwork(two_layers(), ["1"], 5, seed=1)])
    assert not torch.isclose(reseeded.logits(x), logits).any(-1).all()


def test_input_rounding_does_not_change_the_masks() -> None:
    """Another device may normalise pixels with other rounding errors."""
    network = DropoutNetwork(two_layers(), ["1"], 5).eval()
    x = torch.randint(256, (40, 8)) / 255
    torch.testing.assert_close(network(x * (1 + 1e-7)), network(x), rtol=1e-4, atol=1e-5)
    assert (masks(network, x + 0.01) != masks(network, x)).flatten(2).any(-1).all()


def test_mean_over_samples_converges_to_the_network_without_dropout() -> None:
    """For a linear model, the mean over dropout is the model without it."""
    model = two_layers(50).eval()
    samples = 4000
    network = DropoutNetwork(model, ["1"], samples).eval()
    x = torch.randn(5, 8)
    with torch.no_grad():
        outputs, expected = network(x), model(x)
    error = outputs.std(0) / samples**0.5
    assert float(((outputs.mean(0) - expected) / error).abs().max()) < 4
    hidden = model[1](x)  # each term h_j W_kj is kept with probability 3/4 and then divided by it
    variance = (hidden[:, None] * model[2].weight).square().sum(-1) * 0.25 / 0.75
    torch.testing.assert_close(outputs.var(0), variance.detach(), rtol=0.1, atol=0.0)


def test_training_draws_from_the_global_random_state() -> None:
    network = DropoutNetwork(two_layers(), ["1"], 5)
    x = torch.randn(6, 8)
    torch.manual_seed(5)
    outputs = network.train()(x)
    torch.manual_seed(5)
    expected = network.network[2](F.dropout(F.linear(x, network.network[1].weight, network.network[1].bias), 0.25))
    assert outputs.shape == (1, 6, 3)
    torch.testing.assert_close(outputs[0], expected)
    assert not torch.equal(outputs, network(x))


def test_every_layer_drops_other_elements() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 100), nn.Linear(100, 100), nn.Linear(100, 3))
    network = DropoutNetwork(model, ["1", "2"], 5).eval()
    x = torch.randn(6, 8)
    agreement = (masks(network, x, "1") == masks(network, x, "2")).double().mean()
    assert 0.58 < float(agreement) < 0.67  # 0.625 by chance


class Twice(nn.Module):
    """Call one layer twice and fold its tokens into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inner(self.inner(x.flatten(0, 1)))
        return self.head(tokens.unflatten(0, x.shape[:2]).mean(1))


def test_repeated_layer_drops_other_elements_in_each_call() -> None:
    torch.manual_seed(0)
    network = DropoutNetwork(Twice(), ["inner"], 4).eval()
    kept = []
    dropout = network.network.inner.sampled_dropout
    assert isinstance(dropout, SampledDropout)
    dropout.register_forward_hook(lambda _m, _inputs, output: kept.append(output != 0))
    x = torch.randn(10, 7, 6)
    outputs = network(x)
    assert kept[0].shape == (280, 6)
    assert 0.5 < float((kept[0] == kept[1]).double().mean()) < 0.75  # 0.625 by chance
    torch.testing.assert_close(network(x[3:5]), outputs[:, 3:5])
    with pytest.raises(RuntimeError, match="call the DropoutNetwork"):
        network.network(x)


def test_threads_predict_with_one_network_as_one_thread_does() -> None:
    network = DropoutNetwork(two_layers(), ["1"], 5).eval()
    batches = [torch.randn(rows, 8) for rows in (40, 70, 100)]
    expected = [network(x) for x in batches]

    def predict_often(x: Tensor) -> list[Tensor]:
        return [network(x) for _ in range(100)]

    with ThreadPoolExecutor(len(batches)) as executor:
        for outputs, wanted in zip(executor.map(predict_often, batches), expected, strict=True):
            assert all(torch.equal(output, wanted) for output in outputs)


def test_invalid_arguments_are_errors() -> None:
    data = se.Data.from_arrays(torch.randn(40, 8), torch.arange(40) % 3)
    with pytest.raises(ValueError, match="probability must be at least 0 and less than 1, not 1"):
        se.methods.mc_dropout(two_layers(), data, probability=1.0, quiet=True)
    with pytest.raises(ValueError, match="no hidden linear layer or convolution"):
        se.methods.mc_dropout(nn.Linear(8, 3), data, quiet=True)
    with pytest.raises(ValueError, match="members must be"):
        se.methods.mc_dropout(two_layers(), data, members=0, quiet=True)


def small_dropout_network() -> DropoutNetwork:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), conv(8, 8), nn.Flatten(), nn.Linear(288, 3))
    return DropoutNetwork(model, find_called_layers(model, images()).hidden, 5)


def test_a_program_drops_the_same_elements_in_training() -> None:
    # Masks are drawn in the order of memory, and stacked weights are stored channels last.
    network = small_dropout_network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    told: list[str] = []
    (one,) = compile_networks([network], images(), False, True, told.append)
    assert told == []
    names = operations(str(one.program))
    assert names[:4] == ["member_conv", "member_dropout", "member_norm", "member_conv"]
    assert names.count("member_dropout") == 2
    torch.manual_seed(1)
    (actual,) = results_of(one.program, [network], [images(5)])
    torch.manual_seed(1)
    assert_equal(actual, results_of_network(network, images(5), one.program.counters))


def test_a_users_hook_beside_ours_keeps_the_network_as_it_is() -> None:
    network = small_dropout_network()
    assert not has_hooks(network)
    network.network[0].register_forward_hook(lambda *_: None)  # type: ignore[index,union-attr]
    assert has_hooks(network)


def test_training_needs_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    recipe = se.Recipe(epochs=3, batch_size=64, rate=0.02, augmentation="none")
    ensemble = se.methods.mc_dropout(model, few_digits(), recipe=recipe, quiet=True)
    assert ensemble.history is not None
    assert ensemble.history.engine == "graph"
    assert ensemble.history.fallbacks == []
    assert ensemble.history.rows[-1]["loss"] < 0.7 * ensemble.history.rows[0]["loss"]
