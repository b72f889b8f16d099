"""BatchEnsemble: one pass equals a loop over members with explicit weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import structured_ensembles as se
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork, _assign_rows
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.networks.copying import clone_model
from tests.support.engines import use_engine
from tests.support.networks import Nested
from tests.support.real_data import few_digits


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def one_dimensional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv1d(6, 3, 2), nn.Flatten(), nn.Linear(15, 5))


def three_dimensional() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 4, 2, bias=False), nn.Tanh(), nn.Conv3d(4, 2, 2), nn.Flatten(), nn.Linear(16, 5))


MODELS = {
    "nested": (Nested, (3, 6, 6)),
    "convolutions": (convolutions, (2, 9, 9)),
    "1d": (one_dimensional, (4, 8)),
    "3d": (three_dimensional, (2, 4, 4, 4)),
}


def written_out(layer: nn.Module, member: int) -> Tensor:
    """Compute W ∘ (r sᵀ) entry by entry."""
    weight, r, s = layer.weight, layer.output_factors[member], layer.input_factors[member]
    rows = []
    for first in range(weight.shape[0]):
        row = []
        for second in range(weight.shape[1]):
            if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # (inputs, outputs / groups, …)
                group = first // (weight.shape[0] // layer.groups)
                factor = r[group * weight.shape[1] + second] * s[first]
            else:
                groups = getattr(layer, "groups", 1)
                group = first // (weight.shape[0] // groups)
                factor = r[first] * s[group * weight.shape[1] + second]
            row.append(weight[first, second] * factor)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def looped(network: BatchEnsembleNetwork, base: nn.Module, x: Tensor) -> Tensor:
    """Run the members one by one, each as the base network with its own weights."""
    outputs = []
    for member in range(network.num_members):
        tensors = (*network.network.named_parameters(), *network.network.named_buffers())
        shared_tensors = {name: tensor for name, tensor in tensors if name.rpartition(".")[0] not in network.layers}
        for name in network.layers:
            layer = network.network.get_submodule(name)
            shared_tensors[f"{name}.weight"] = written_out(layer, member)
            if "biases" in layer._parameters:
                shared_tensors[f"{name}.bias"] = layer.biases[member]
        outputs.append(functional_call(base, shared_tensors, (x,)))
    return torch.stack(outputs)


def made(name: str, repeat: str = "tile", members: int = 3) -> tuple[BatchEnsembleNetwork, nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    x = torch.randn(4, *shape)
    network = BatchEnsembleNetwork(model, find_called_layers(model, x).all, members, repeat, seed=1)
    with torch.no_grad():
        for parameter in network.parameters():  # away from signs and from equal biases
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network, model, x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_one_pass_equals_a_loop_over_members(name: str, training: bool) -> None:
    network, base, x = made(name)
    for network_or_base in (network, base):
        network_or_base.train(training)
        for module in network_or_base.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # its statistics in training are those of all rows, see the test below
    parameters = [parameter for key, parameter in network.named_parameters() if "unused" not in key]
    together, one_by_one = network(x), looped(network, base, x)
    assert together.shape == (3, 4, 5)
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-5)
    weighting = torch.randn_like(together)
    gradients = torch.autograd.grad((together * weighting).sum(), parameters)
    expected = torch.autograd.grad((one_by_one * weighting).sum(), parameters)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    dims=st.integers(1, 3),
    groups=st.integers(1, 3),
    inputs=st.integers(1, 2),
    outputs=st.integers(1, 2),
    members=st.integers(1, 4),
    bias=st.booleans(),
)
def test_convolutions_of_any_dimension_equal_the_loop_over_members(
    dims: int, groups: int, inputs: int, outputs: int, members: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer_type = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(layer_type(inputs * groups, outputs * groups, 2, groups=groups, bias=bias))
    network = BatchEnsembleNetwork(model, ["0"], members, seed=members)
    x = torch.randn(2, inputs * groups, *[3] * dims)
    torch.testing.assert_close(network(x), looped(network, model, x), rtol=1e-5, atol=1e-5)


def test_batch_norm_is_shared_by_members() -> None:
    network, _, x = made("convolutions")
    network.train()
    first, norm = network.network[0], network.network[1]
    rows = [F.conv2d(x, written_out(first, m), first.biases[m], stride=2) for m in range(3)]
    stacked = torch.cat(rows)
    expected = F.batch_norm(stacked, None, None, norm.weight, norm.bias, training=True)
    seen = []
    norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output.clone()))
    network(x)
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_mean, 0.1 * stacked.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 7])
def test_split_assigns_every_row_to_one_member(batch: int) -> None:
    network, base, _ = made("nested", repeat="split")
    x = torch.randn(batch, 3, 6, 6)
    members = [row * 3 // batch for row in range(batch)]
    expected = torch.stack([looped(network, base, x)[member, row] for row, member in enumerate(members)])
    network.train()
    torch.testing.assert_close(network(x), expected[None], rtol=1e-5, atol=1e-5)
    assert network.eval()(x).shape == (3, batch, 5)


@given(batch=st.integers(1, 40), members=st.integers(1, 9))
def test_rows_are_dealt_evenly(batch: int, members: int) -> None:
    filled_rows, row_positions = _assign_rows(batch, members, torch.device("cpu"))
    share = math.ceil(batch / members)
    assert len(filled_rows) == members * share
    assert filled_rows[row_positions].tolist() == list(range(batch))  # every row is at its position
    counts = torch.bincount(row_positions // share, minlength=members)
    assert int(counts.max() - counts.min()) <= 1


def test_factors_start_as_signs_and_the_model_stays_unchanged() -> None:
    torch.manual_seed(0)
    model = Nested()
    before = clone_model(model)
    x = torch.randn(2, 3, 6, 6)
    network = BatchEnsembleNetwork(model, find_called_layers(model, x).all, members=4, seed=3)
    assert network.layers == ("stem.0", "blocks.0.depthwise", "twice", "up", "head")
    for name in network.layers:
        layer = network.network.get_submodule(name)
        assert set(layer.input_factors.unique().tolist()) <= {-1.0, 1.0}
        assert set(layer.output_factors.unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(layer.weight, model.get_submodule(name).weight)
    assert torch.equal(network.network.twice.biases, model.twice.bias.expand(4, -1))
    assert not hasattr(network.network.unused, "input_factors")
    assert str(model) == str(before)
    assert all(
        torch.equal(parameter, earlier)
        for parameter, earlier in zip(model.parameters(), before.parameters(), strict=True)
    )
    assert not model.twice._forward_hooks
    again = BatchEnsembleNetwork(model, network.layers, members=4, seed=3)
    earlier = BatchEnsembleNetwork(model, network.layers, members=4, seed=4)
    assert torch.equal(network(x), again(x))
    assert not torch.equal(network(x), earlier(x))


def test_parameters_of_resnet20_equal_a_hand_count() -> None:
    model = se.zoo.resnet20(10)
    network = BatchEnsembleNetwork(model, find_called_layers(model, torch.randn(2, 3, 8, 8)).all, members=5)
    # inputs + outputs: stem; six convolutions of 16; 16 to 32 and five of 32; 32 to 64 and five of 64; the head
    factors = (3 + 16) + 6 * (16 + 16) + (16 + 32) + 5 * (32 + 32) + (32 + 64) + 5 * (64 + 64) + (64 + 10)
    ensemble = se.Ensemble([network])
    assert ensemble.num_parameters == 269_722 + 5 * factors + 4 * 10 == 276_707
    assert len(ensemble) == 5
    assert ensemble.overhead(model) == pytest.approx(1.0259, abs=1e-4)


class SequenceFirst(nn.Module):
    """Keep the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


def test_invalid_arguments_and_models_are_errors() -> None:
    data = se.Data.from_arrays(torch.randn(40, 5, 3), torch.arange(40) % 2)
    with pytest.raises(ValueError, match="does not keep them in the first dimension"):
        se.methods.batch_ensemble(SequenceFirst(), data, 5, quiet=True)
    with pytest.raises(ValueError, match="has no linear layer or convolution"):
        se.methods.batch_ensemble(nn.Flatten(), data, quiet=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(15, 2))
    with pytest.raises(ValueError, match="repeat must be one of 'tile', 'split', not 'both'"):
        se.methods.batch_ensemble(model, data, repeat="both", quiet=True)
    with pytest.raises(ValueError, match="members must be"):
        se.methods.batch_ensemble(model, data, 0, quiet=True)
    with pytest.raises(ValueError, match="layers must name linear layers and convolutions of the model, not '0'"):
        BatchEnsembleNetwork(model, ["0"], 2)


class Transformer(nn.Module):
    """Read weights in the attention without calling the layers that own them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def test_attention_weights_are_shared_by_members() -> None:
    torch.manual_seed(0)
    model, x = Transformer().eval(), torch.randn(4, 5, 6)
    layers = find_called_layers(model, x).all
    assert layers == ("embed", "encoder.linear1", "encoder.linear2", "head")
    network = BatchEnsembleNetwork(model, layers, 3).eval()
    with torch.no_grad():
        torch.testing.assert_close(network(x), looped(network, model, x), rtol=1e-5, atol=1e-5)


def test_autocast_dtype_is_kept() -> None:
    network, _, x = made("convolutions")
    seen = []
    network.network[4].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(x)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_the_program_of_all_members_trains_as_the_network_does(
    monkeypatch: pytest.MonkeyPatch, precision: str, close: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none")
    execution = se.Execution(precision=precision)  # type: ignore[arg-type]
    losses, weights = {}, {}
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        ensemble = se.methods.batch_ensemble(
            model, few_digits(), 3, recipe=recipe, execution=execution, seed=1, quiet=True
        )
        assert ensemble.history is not None
        assert (ensemble.history.engine, ensemble.history.fallbacks) == (engine, [])
        losses[engine] = [row[name] for row in ensemble.history.rows for name in ("loss", "validation_loss")]
        weights[engine] = ensemble.members.state_dict()
    assert losses["graph"] == pytest.approx(losses["loop"], rel=close)
    if precision == "float32":
        for name, tensor in weights["graph"].items():
            torch.testing.assert_close(tensor, weights["loop"][name], rtol=1e-3, atol=1e-5)
