"""The published tables: complete, consistent, and suspicious where we say so."""

import itertools
import math

import pytest

from structured_ensembles import zoo
from structured_ensembles.data.sources import data_sets
from structured_ensembles.paper.metrics import METRICS
from structured_ensembles.paper.published import Cell, Table, published, table_names
from structured_ensembles.scaling import Initial

METHODS = ("single", "deep", "snapshot", "batch-ensemble", "mc-dropout", "structured")
DATASETS = ("svhn", "cifar10", "cifar100", "tiny-imagenet")
SETTING = "the same setting is 90.95"


def percent(cell: Cell) -> float:
    return round(100 * cell.value, 6)


def doubted(table: Table) -> set[tuple[str, str]]:
    return {key for key, cell in table.cells.items() if cell.suspicious is not None}


@pytest.fixture(params=table_names())
def table(request: pytest.FixtureRequest) -> Table:
    return published(request.param)


def test_every_published_cell_is_present_and_in_our_unit(table: Table) -> None:
    assert set(table.cells) == set(itertools.product(table.rows, table.columns))
    for (_, column), cell in table.cells.items():
        metric = METRICS[table.metrics[column]]
        assert math.isfinite(cell.value)
        assert cell.deviation is None or cell.deviation >= 0
        if metric.percent:  # divided by 100 exactly once
            assert 0.01 < cell.value < 1
        if cell.deviation is not None:
            assert cell.deviation < 0.2 * cell.value + 0.01


def test_published_columns_name_known_data_sets_and_models(table: Table) -> None:
    data_names = set(data_sets())
    models = {name.replace("_", "-") for name in zoo.__all__}
    for column in table.columns:
        words = column.removesuffix(table.metrics[column]).strip("/").split("/")
        for word in filter(None, words):
            assert word in data_names | models or word.startswith(("fgsm-", "corruptions-"))
    assert (table.dataset or "cifar10") in data_names
    assert (table.model or "resnet20") in models


def test_accuracy_covers_every_data_set_model_and_method() -> None:
    table = published("accuracy")
    small, large = ("resnet20", "vgg11"), ("resnet32", "vgg16")
    setups = {f"{data}/{model}" for data in DATASETS for model in (large if data == "tiny-imagenet" else small)}
    assert table.rows == METHODS
    assert set(table.columns) == setups
    assert set(table.metrics.values()) == {"cls/accuracy"}
    # what the text says of it: on VGG with CIFAR-100 and TinyImageNet even better than the deep ensemble
    better = {column for column in table.columns if table["structured", column].value > table["deep", column].value}
    assert better == {"cifar100/vgg11", "tiny-imagenet/vgg16"}
    assert table["structured", "cifar100/vgg11"] == Cell(0.6313, 0.0102)


def test_other_tables_have_their_rows_and_columns() -> None:
    assert published("ece").rows == METHODS
    assert published("ece").columns == ("cifar10/resnet20", "cifar100/resnet20", "tiny-imagenet/resnet32")
    assert published("diversity").rows == METHODS[1:]
    assert published("uncertainty").rows == METHODS[2:]
    assert published("memory").rows == tuple(method for method in METHODS if method != "batch-ensemble")
    assert published("pruning").rows == ("0.3", "0.5", "0.6", "0.7", "0.8")
    assert published("initialization").rows == tuple(Initial.__args__[:-1])  # the last is for trained networks
    learners = ("naive", "single", "supsup", "pruning", "batch-ensemble", "structured")
    assert published("continual-accuracy").rows == published("continual-memory-bits").rows == learners
    assert published("continual-memory").rows == learners[1:]
    scopes = {f"{scope}-{extraction}" for scope in ("layer", "network") for extraction in ("soft", "hard")}
    assert set(published("continual-ablation").rows) == scopes


def test_structured_is_the_same_in_every_table_that_repeats_it() -> None:
    ece, diversity, pruning = published("ece"), published("diversity"), published("pruning")
    assert pruning["0.5", "cal/ece"] == ece["structured", "cifar10/resnet20"]
    for metric in diversity.columns:
        assert pruning["0.5", metric] == diversity["structured", metric]
    assert published("memory")["structured", "size/overhead"] == pruning["0.5", "size/overhead"]


def test_discarding_raises_the_accuracy_in_every_cell() -> None:
    table = published("uncertainty")
    for row in table.rows:
        for where in ("fgsm-0.02", "fgsm-0.5", "corruptions-3", "corruptions-5"):
            before, after = table[row, f"{where}/cls/accuracy"], table[row, f"{where}/unc/filtered_accuracy"]
            kept = 1 - table[row, f"{where}/unc/discarded"].value
            assert after.value > before.value
            assert kept * after.value < before.value  # no more correct ones are kept than there were


def test_published_bits_follow_from_the_backbones() -> None:
    table = published("continual-memory-bits")
    for model, backbone in (("lenet5", zoo.lenet5_backbone()), ("half-vgg11", zoo.half_vgg11_backbone())):
        weights = [parameter for parameter in backbone.parameters() if parameter.ndim == 4]
        count, neurons = sum(weight.numel() for weight in weights), sum(len(weight) for weight in weights)
        column = f"{model}/size/bits_per_task"
        assert table["naive", f"{model}/size/bits"].value == table["single", column].value == 64 * count
        assert table["supsup", column].value == table["pruning", column].value == count
        assert table["structured", column].value == neurons


def test_cells_marked_as_repeats_are_repeats() -> None:
    accuracy, ece, diversity = published("accuracy"), published("ece"), published("diversity")
    for method in ("single", "batch-ensemble", "mc-dropout", "deep"):
        vgg, resnet = accuracy[method, "cifar10/vgg11"], accuracy[method, "cifar10/resnet20"]
        assert vgg.value == resnet.value
        assert (vgg.deviation == resnet.deviation) == (method != "deep")
        assert "ResNet20" in vgg.suspicious
    for method, outcome in (("snapshot", "cc"), ("batch-ensemble", "cc"), ("mc-dropout", "wc")):
        cell, twin = ece[method, "tiny-imagenet/resnet32"], diversity[method, f"div/{outcome}"]
        assert 100 * cell.value == pytest.approx(twin.value)  # shares, and per cent of log C
        assert 100 * cell.deviation == pytest.approx(twin.deviation)
        assert f"{outcome.upper()} diversity" in cell.suspicious
    initial = published("initialization")
    for metric in ("size/overhead", "div/cc", "div/wc"):
        assert initial["N(0,1)", metric] == initial["N(0,2)", metric]
    pruning = published("pruning")
    for metric in pruning.columns:  # the 60 % row: other digits, but within the deviations
        half, more = pruning["0.5", metric], pruning["0.6", metric]
        assert abs(half.value - more.value) <= max(half.deviation, more.deviation) + 1e-9
    settings = [
        accuracy["structured", "cifar10/resnet20"],
        pruning["0.5", "cls/accuracy"],
        initial["N(0,1)", "cls/accuracy"],
    ]
    assert [percent(cell) for cell in settings] == [90.95, 90.66, 91.05]
    assert all(cell.suspicious.startswith(SETTING) for cell in settings)


def test_suspicious_cells_are_exactly_those_listed() -> None:
    assert doubted(published("accuracy")) == {
        *((method, "cifar10/vgg11") for method in ("single", "deep", "batch-ensemble", "mc-dropout", "snapshot")),
        ("structured", "cifar10/resnet20"),
    }
    assert doubted(published("ece")) == {
        (method, "tiny-imagenet/resnet32") for method in ("snapshot", "batch-ensemble", "mc-dropout")
    }
    pruning, initial = published("pruning"), published("initialization")
    assert doubted(pruning) == {("0.5", "cls/accuracy"), *(("0.6", metric) for metric in pruning.columns)}
    shared = ("size/overhead", "div/cc", "div/wc")
    assert doubted(initial) == {
        ("N(0,1)", "cls/accuracy"),
        *((row, metric) for row in ("N(0,1)", "N(0,2)") for metric in shared),
    }
    uncertainty = published("uncertainty")
    attacks = [column for column in uncertainty.columns if column.startswith("fgsm")]
    assert len(attacks) == 6
    assert doubted(uncertainty) == {(row, column) for row in uncertainty.rows for column in attacks}
    assert doubted(published("continual-memory-bits")) == {("batch-ensemble", "lenet5/size/bits_per_task")}
    known = {"accuracy", "ece", "pruning", "initialization", "uncertainty", "continual-memory-bits"}
    assert not any(doubted(published(name)) for name in set(table_names()) - known)


def test_reasons_for_suspicion_follow_from_the_numbers() -> None:
    accuracy = published("accuracy")
    vgg, resnet = (accuracy["snapshot", f"cifar10/{model}"] for model in ("vgg11", "resnet20"))
    assert percent(resnet) - percent(vgg) == pytest.approx(1)  # one digit
    assert vgg.deviation == resnet.deviation
    factors = [
        sum(parameter.shape[:2])  # one number per input and output channel
        for parameter in zoo.lenet5_backbone().parameters()
        if parameter.ndim == 4
    ]
    cell = published("continual-memory-bits")["batch-ensemble", "lenet5/size/bits_per_task"]
    assert (sum(factors), cell.value / 64) == (165, 164)


def test_suspicious_cells_and_bounds_are_not_targets(table: Table) -> None:
    targets = table.targets()
    assert not doubted(table) & set(targets)
    bounds = {key for key, cell in table.cells.items() if cell.below}
    assert set(targets) == set(table.cells) - doubted(table) - bounds
    expected = {("batch-ensemble", "size/floats_per_task"), ("structured", "size/binaries_per_task")}
    assert bounds == (expected if table.name == "continual-memory" else set())


def test_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"name must be one of accuracy, memory, ece.*not 'speed'"):
        published("speed")
