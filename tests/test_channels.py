"""trace(): groups, reasons for fixed channels, and an unchanged model."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import structured_ensembles as se
from tests.support.exactness import check_exact, randomize


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """A network that calls one convolution twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(F.relu(self.twice(self.stem(x)))).mean((2, 3)))


def test_resnet20_has_the_first_convolution_of_each_block_prunable() -> None:
    graph = se.trace(se.zoo.resnet20(), image(2, 3, 32, 32))
    expected = {f"layer{stage}.{block}.conv1": 8 * 2**stage for stage in (1, 2, 3) for block in (0, 1, 2)}
    assert graph.prunable == expected
    assert graph["fc"].reason == "reaches the network's output"
    assert "residual sum" in str(graph["conv1"].reason)
    assert graph["layer2.1.conv1"].producers == ("layer2.1.conv1",)
    assert graph["layer2.1.conv1"].consumers == ("layer2.1.conv2",)


def test_vgg_and_lenet_have_all_but_the_last_layer_prunable() -> None:
    graph = se.trace(se.zoo.vgg11(), image(2, 3, 32, 32))
    assert list(graph.prunable.values()) == [64, 128, 256, 256, 512, 512, 512, 512, 4096, 4096]
    graph = se.trace(se.zoo.lenet5(), image(2, 1, 28, 28))
    assert list(graph.prunable.values()) == [6, 16, 120, 84]
    assert sum(se.trace(se.zoo.half_vgg11(), image(2, 3, 32, 32)).prunable.values()) == 1376


def test_coupled_makes_the_residual_stream_one_prunable_group() -> None:
    model = randomize(se.zoo.resnet20(width=1))
    graph = check_exact(model, image(2, 3, 8, 8).double(), coupled=True)
    stream = graph["conv1"]
    assert stream.prunable
    assert stream.coupled
    assert len(stream.producers) == 10  # the stem and the second convolution of every block, by the padded shortcuts
    assert set(graph.outputs) == {layer for group in graph.groups if group.prunable for layer in group.producers}


def test_every_parameter_axis_is_mapped() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
    graph = se.trace(model, image())
    assert [span.group for span in graph.axes["0.weight"][0]] == ["0"]
    for name in ("0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        assert [tuple(span) for span in graph.axes[name][0]] == [("0", 6, 1)]
    assert [tuple(span) for span in graph.axes["4.weight"][1]] == [("0", 6, 36)]
    assert set(graph.axes) == set(model.state_dict())


class Case(nn.Module):
    """A stem of 8 channels, an operation on them, and a convolution that reads the result."""

    def __init__(self, act: object, reads: int = 8, **modules: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.act = act
        for name, module in modules.items():
            self.add_module(name, module)
        self.last = nn.Conv2d(reads, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self, self.stem(x))).mean((2, 3))


FREE = {
    "clone and to": lambda net, x: x.clone().contiguous().to(x.dtype),
    "stack and sum": lambda net, x: torch.stack([x, x.relu()]).sum(0),
    "where": lambda net, x: torch.where(x > 0, x, torch.zeros_like(x)),
    "in place": lambda net, x: x.mul_(2).add_(1).relu_(),
    "masked": lambda net, x: x.masked_fill(x < 0, -1),
    "max of two": lambda net, x: torch.maximum(x, x * 2),
    "upsampled": lambda net, x: F.interpolate(x, size=(5, 5), mode="bilinear"),
    "lp pooled": lambda net, x: F.lp_pool2d(x, 2, 2),
    "reflected": lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "spatial softmax": lambda net, x: x.flatten(2).softmax(-1).view_as(x),
    "spatial attention": lambda net, x: x * net.look(x).sigmoid().expand_as(x),
    "broadcast zeros": lambda net, x: x + torch.zeros(1, 1, 1, 1, dtype=x.dtype),
    "movedim": lambda net, x: x.movedim(1, -1).movedim(-1, 1),
    "pixel shuffle and back": lambda net, x: net.up(x).relu(),
    "patches": lambda net, x: F.unfold(x, 3, padding=1).unflatten(1, (-1, 9)).amax(2).unflatten(-1, (8, 8)),
    "patches and back": lambda net, x: F.fold(F.unfold(x, 3, padding=1).relu(), (8, 8), 3, padding=1),
}
FIXED = {
    "layer norm": (lambda net, x: F.layer_norm(x.movedim(1, -1), (8,)).movedim(-1, 1), "layer norm mixes"),
    "group norm": (lambda net, x: F.group_norm(x, 2), "group norm mixes"),
    "softmax": (lambda net, x: x.softmax(1), "softmax runs over"),
    "mean over channels": (lambda net, x: x - x.mean(1, keepdim=True), "mean runs over"),
    "normalised": (lambda net, x: F.normalize(x), "runs over its channels"),
    "unaligned": (lambda net, x: x.reshape(x.shape[0], 16, 4, 8).view(-1, 8, 8, 8).roll(1, 1), "roll runs over"),
    "one channel": (lambda net, x: x * x[:, 0].unsqueeze(1), "picks single channels"),
    "rolled": (lambda net, x: x.roll(1, 1), "roll runs over"),
    "attention over channels": (
        lambda net, x: ((x.flatten(2) @ x.flatten(2).mT).softmax(-1) @ x.flatten(2)).view_as(x),
        "softmax runs over",
    ),
    "sorted": (lambda net, x: x.sort(1).values, "sort runs over"),
    "unknown": (lambda net, x: x.cummax(1).values, "cummax is not understood"),
    "image added": (lambda net, x: x + net.image, "constant tensor"),
}
RELIES = {
    "a view of 8": lambda net, x: x.view(-1, 8, 8, 8),
    "a slice of 3": lambda net, x: torch.cat([x[:, :3], x[:, 3:]], 1),
    "a tensor of 8": lambda net, x: x / torch.tensor(x.shape[1], dtype=x.dtype).sqrt(),
    "a tensor of a root": lambda net, x: x / torch.tensor(x.shape[1] ** 0.5, dtype=x.dtype).add(1),
    "one over 8": lambda net, x: x * (1 / x.shape[1]),
    "one over 8, twice": lambda net, x: x * (1 / x.shape[1]) + x / x.shape[1],
    "an assertion": lambda net, x: x if x.shape[1] == 8 else 1 / 0,
    "only some sizes": lambda net, x: x * 0.5 if x.shape[1] > 5 else x,
}


@pytest.mark.parametrize("name", FREE)
def test_known_operations_keep_channels_prunable(name: str) -> None:
    shuffled = "shuffle" in name
    up, look = nn.Sequential(nn.Conv2d(8, 12, 1), nn.PixelShuffle(2)), nn.Conv2d(8, 1, 1)
    model = randomize(Case(FREE[name], 3 if shuffled else 8, up=up, look=look))
    graph = check_exact(model, image().double(), prune=0.4)
    assert "stem" in graph.prunable
    assert not shuffled or graph.prunable["up.0"] == 3  # of its twelve channels, four go together


def test_part_of_a_layer_can_be_prunable() -> None:
    graph = check_exact(randomize(Case(lambda net, x: x * x[:, :1])), image().double())
    assert graph.prunable == {"stem[1:8]": 7}
    assert graph["stem[0:1]"].reason == "a single channel"


@pytest.mark.parametrize("name", FIXED)
def test_unknown_operations_fix_channels_with_a_reason(name: str) -> None:
    act, reason = FIXED[name]
    model = Case(act)
    model.image = image(1, 8, 8, 8)
    graph = check_exact(randomize(model), image().double()) if name != "image added" else se.trace(model, image())
    assert "stem" not in graph.prunable
    reasons = " | ".join(str(group.reason) for group in graph.groups if "stem" in group.producers)
    assert re.search(reason, reasons), reasons


@pytest.mark.parametrize("name", RELIES)
def test_code_that_relies_on_sizes_fixes_channels_or_is_cut_in_its_graph(name: str) -> None:
    model = randomize(Case(RELIES[name]))
    graph = check_exact(model, image().double(), graphs=False)
    assert "stem" not in graph.prunable
    reasons = " | ".join(str(group.reason) for group in graph.groups if "stem" in group.producers)
    assert "relies on its size" in reasons
    for prune in (0.2, 0.5, 0.6):
        graph = check_exact(model, image().double(), prune=prune)
        groups = [group for group in graph.groups if "stem" in group.producers and group.prunable]
        assert sum(group.size for group in groups) == 8
        assert any("relies on its size" in str(group.in_code) for group in groups)
    assert "yes, in the graph" in str(graph)


def test_shared_weights_and_weight_norm_fix_channels() -> None:
    graph = se.trace(Shared(), image())
    assert graph.prunable == {}
    assert "shared weights" in str(graph["stem"].reason)

    tied = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    tied[2].weight = tied[0].weight
    graph = se.trace(tied, image(2, 6))
    assert "0" not in graph.prunable

    for weight_norm in (parametrizations.weight_norm, torch.nn.utils.weight_norm):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the second is the old style
            normed = weight_norm(nn.Conv2d(3, 8, 3))
        model = nn.Sequential(normed, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1))
        graph = se.trace(model, image())
        assert list(graph.prunable) == ["2"]  # the others are fixed or end in the output
        assert "weight_norm is not understood" in str(graph["0"].reason)
        assert (graph["0"].size, graph["0"].producers, graph["0"].consumers) == (8, ("0",), ("2",))


def test_bare_parameters_are_consumers_but_not_groups() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.matrix = nn.Conv2d(3, 8, 8), nn.Parameter(torch.randn(8, 5))
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.conv(x).flatten(1) @ self.matrix).relu())

    graph = se.trace(Bare(), image())
    assert list(graph.prunable) == ["conv"]
    small = se.extract(Bare(), graph, se.select(graph, prune=0.5, selection="random", members=1)[0])
    assert small.matrix.shape == (4, 5)


def test_auxiliary_heads_of_training_mode_are_extracted_too() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.aux, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            x = self.stem(x).relu()
            out = self.head(x.mean((2, 3)))
            return (out, self.aux(x).mean((2, 3))) if self.training else out

    graph = check_exact(randomize(Auxiliary()), image().double())
    assert graph["stem"].consumers == ("head", "aux")


@pytest.mark.parametrize("training", [True, False])
def test_trace_leaves_the_model_unchanged(training: bool) -> None:
    model = se.zoo.resnet20().train(training)
    model.conv1.weight.requires_grad_(False)
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    se.trace(model, image(1, 3, 32, 32))
    assert [module.training for module in model.modules()] == modes
    assert not model.conv1.weight.requires_grad
    assert all(p.requires_grad and p.grad is None for n, p in model.named_parameters() if n != "conv1.weight")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, (tensor, _) in before.items())
    assert all(model.state_dict()[name].data_ptr() == pointer for name, (_, pointer) in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_trace_accepts_any_dtype_and_several_inputs() -> None:
    assert se.trace(se.zoo.resnet20().bfloat16(), image(2, 3, 8, 8).bfloat16()).prunable

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(3, 6), nn.Linear(5, 7), nn.Linear(13, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.cat([self.left(a), self.right(b)], -1))

    graph = se.trace(Two(), (image(2, 3), image(2, 5)))
    assert graph.prunable == {"left": 6, "right": 7}


def test_printed_graph_is_a_table() -> None:
    text = str(se.trace(se.zoo.lenet5(), image(2, 1, 28, 28)))
    lines = text.splitlines()
    assert lines[0].split() == ["group", "size", "computed", "by", "read", "by", "prunable"]
    assert lines[2].split() == ["backbone.conv1", "6", "backbone.conv1", "backbone.conv2", "yes"]
    assert lines[-2].endswith("reaches the network's output")
    assert lines[-1] == "4 of 5 groups can be pruned: 226 channels"


def test_a_group_of_an_unknown_name_is_an_error() -> None:
    graph = se.trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(2, 4))
    assert graph["0"].size == 8
    for loop in (lambda: graph["2"], lambda: list(graph)):  # type: ignore[call-overload]
        with pytest.raises(KeyError, match="there is no group"):
            loop()


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"example.*\(2, 1, 8, 8\)|shape \(2, 1, 8, 8\).*example"):
        se.trace(se.zoo.resnet20(), image(2, 1, 8, 8))
    with pytest.raises(TypeError, match="model must be"):
        se.trace(lambda x: x, image())
    with pytest.raises(TypeError, match="example must be"):
        se.trace(se.zoo.resnet20(), [1, 2])
    graph = se.trace(nn.Linear(3, 2), image(2, 3))
    with pytest.raises(ValueError, match="no prunable channels"):
        se.select(graph, prune=0.5, selection="random", members=2)


def test_trace_time_grows_linearly() -> None:
    """Concatenating everything before is the worst case for layouts."""

    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4 + 2 * index, 2) for index in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.cat([x, layer(x).relu()], -1)
            return x.sum(-1)

    graph = se.trace(copy.deepcopy(Deep(20)), image(2, 4))
    assert "sum runs over" in str(graph["layers.3"].reason)


# Findings of an adversarial reviewer -------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A norm over the features that a linear layer computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 8), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm1d(6, affine=True), nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)]
)
def test_layer_norms_over_tokens_fix_the_features(norm: nn.Module) -> None:
    graph = check_exact(randomize(Tokens(norm)), image(2, 6, 5).double())
    assert "norm runs over it" in str(graph["a"].reason)


def test_parametrized_layers_are_fixed_and_unchanged() -> None:
    normed = parametrizations.spectral_norm(nn.Conv2d(5, 6, 1))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.ReLU(), normed, nn.ReLU(), nn.Conv2d(6, 2, 1)
    )
    graph = check_exact(randomize(model.train()), image().double())
    assert list(graph.prunable) == ["0"]
    before = normed.parametrizations.weight[0]._u.clone()
    small = se.extract(model, graph, se.select(graph, prune=0.5, selection="random", members=1)[0])
    assert torch.equal(small[4].parametrizations.weight[0]._u, before)
    orthogonal = parametrizations.orthogonal(nn.Linear(8, 6), orthogonal_map="cayley")
    assert se.trace(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), orthogonal, nn.ReLU(), nn.Linear(6, 2)), image(2, 3)
    ).groups


SIZED = {
    "three unequal chunks": lambda net, x: torch.cat([chunk.relu() for chunk in x.chunk(3, 1)], 1),
    "halves by slices": lambda net, x: torch.cat(
        [x[:, : x.shape[1] // 2].relu(), x[:, x.shape[1] // 2 :].sigmoid()], 1
    ),
    "halves by split": lambda net, x: torch.cat(
        [p * n for n, p in enumerate(torch.split(x, x.shape[1] // 2, 1), 1)], 1
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_code_that_depends_on_the_channel_count_fixes_channels(name: str) -> None:
    model = randomize(Case(SIZED[name]))
    for prune in (0.2, 0.5, 0.7):
        assert "stem" not in check_exact(model, image().double(), prune=prune, graphs=False).prunable
        check_exact(model, image().double(), prune=prune)


def test_constant_tensor_in_the_code_is_not_cut() -> None:
    """Its value is known to torch.export only, and may count channels."""

    def divide(net: nn.Module, x: Tensor) -> Tensor:
        return x / torch.tensor(float(x.shape[1]), dtype=x.dtype).sqrt()

    model = randomize(Case(divide))
    assert "stem" not in check_exact(model, image().double(), graphs=False).prunable
    check_exact(model, image().double())


def test_computed_weights_fix_their_sources() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.exp = nn.Linear(3, 8), nn.Linear(3, 8), nn.Parameter(torch.randn(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(self.query(x), self.key(x))[:, :2], self.exp.exp())

    graph = se.trace(Products(), image(4, 3))
    assert graph.prunable == {}
    assert "weight that is computed" in str(graph["query"].reason)


class Training(nn.Module):
    """A network that applies another operation in training mode."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.stem, self.aux, self.head, self.case = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4), nn.Linear(8, 4), case

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        if self.training and self.case == "mean":
            x = x - x.mean(1, keepdim=True)
        out = self.head(x.mean((2, 3)))
        if self.training and self.case == "hard-coded":
            return out, self.aux(x.view(-1, 8 * 36))
        if self.training and self.case == "untraceable" and bool(out.sum() > 1e6):
            raise ValueError
        return out


@pytest.mark.parametrize(
    ("case", "reason"),
    [("mean", "mean runs over"), ("hard-coded", "relies on its size"), ("untraceable", "training mode")],
)
def test_trace_follows_training_mode(case: str, reason: str) -> None:
    assert reason in str(se.trace(Training(case), image(), graphs=False)["stem"].reason)


def test_max_pool_indices_are_followed() -> None:
    act = {
        "both": lambda net, x: F.adaptive_max_pool2d(x, 2),
        "pool": lambda net, x: F.max_pool2d(x, 2, return_indices=True)[0],
    }
    for operation in act.values():
        assert "stem" in check_exact(randomize(Case(operation)), image().double()).prunable


def test_only_the_failing_layers_are_fixed() -> None:
    class Csp(nn.Module):
        """A split of channels at a hard-coded position; the convolution inside stays prunable."""

        def __init__(self) -> None:
            super().__init__()
            self.expand, self.inner = (
                nn.Conv2d(3, 16, 1),
                nn.Sequential(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 8, 1)),
            )
            self.last = nn.Conv2d(16, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.expand(x).split(8, 1)
            return self.last(torch.cat([left, self.inner(right)], 1))

    graph = check_exact(randomize(Csp()), image().double(), graphs=False)
    assert {"inner.0", "inner.2"} <= set(graph.prunable)
    assert "expand[0:8]" not in graph.prunable  # of the other half, any part may go: split(8) leaves it what remains
    graph = check_exact(randomize(Csp()), image().double())
    assert graph["expand[0:8]"].in_code
    assert graph["inner.0"].in_code == "other groups are cut in the graph"


@pytest.mark.parametrize("width", [4, 6, 8, 12, 14, 16, 22])
@pytest.mark.parametrize("pointwise", [False, True])
def test_halves_computed_by_arithmetic_fix_channels(width: int, pointwise: bool) -> None:
    """Half of 2 + 3 channels, rounded down, is 2: the trial must try other numbers, too."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, width, 3), nn.Conv2d(width, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            half = y.shape[1] // 2
            first = y[:, :half].tanh() if pointwise else y[:, :half] * 2
            return self.b(torch.cat([first, y[:, half:]], 1))

    assert check_exact(Halves().double(), image().double(), graphs=False).prunable == {}
    assert sum(check_exact(Halves().double(), image().double()).prunable.values()) == width


def test_stored_activations_nested_inputs_and_lazy_layers_are_handled() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.kept = nn.Linear(3, 8), nn.Linear(8, 2), {"all": []}

        def forward(self, inputs: list[Tensor]) -> Tensor:
            hidden = self.a(inputs[0] + inputs[1])
            self.kept["all"] = [hidden]
            return self.b(hidden)

    model = Remembers()
    both = [image(2, 3), image(2, 3)]
    model(both)
    remembered = model.kept["all"][0]
    assert se.trace(model, (both,)).prunable == {"a": 8}
    assert model.kept["all"][0] is remembered
    with pytest.raises(ValueError, match="lazy layers"):
        se.trace(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), image(2, 3))
