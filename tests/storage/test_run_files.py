"""Damaged files of a run folder: an error that names the file, and never wrong figures."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.continual.results import read_continual_result
from structured_ensembles.report.page import compose_page, group_runs, tabulate_runs
from structured_ensembles.report.pictures import list_front_points
from structured_ensembles.runs.evaluations import evaluation_path, merge_figures, read_figures
from structured_ensembles.runs.finished import read_run
from structured_ensembles.runs.folder import read_config, read_history, read_result, read_subnets
from structured_ensembles.runs.measurement import Request, measure_experiment
from structured_ensembles.runs.samples import read_samples
from structured_ensembles.storage.run_files import CHECKSUM, json_checksum, read_json, write_json, write_yaml

TEXTS = ("config.yaml", "result.json", "evaluation-test-mean.json", "history.csv", "subnets.json")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    command = ["train", "--model", "mlp", "--epochs", "2", "--members", "2", "--quiet", "true"]
    small = ["--model_arguments", '{"hidden": [8]}', "--method_arguments", '{"search_epochs": 1}']
    assert main([*command, *small, "--out", str(folder)]) == 0
    measure_experiment(folder, Request(), device="cpu")
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def contents(folder: Path) -> list[Any]:
    """Read everything that a report reads of a run, as plain values."""
    finished = read_run(folder)
    samples = {name: tensor.tolist() for name, tensor in finished.samples.items()}
    history = read_history(folder, finished.result)
    subnets = [subnet.to_json() for subnet in read_subnets(folder, finished.result)]
    result = {name: value for name, value in finished.result.items() if len(str(value)) != 64}  # a renamed checksum
    return json.loads(json.dumps([finished.config, result, finished.figures, samples, history, subnets]))


def outcome(read: Callable[[Any], Any], argument: Any) -> tuple[Any, ValueError | None]:
    """Return what was read or the expected error; other errors propagate."""
    try:
        return read(argument), None
    except ValueError as error:
        return None, error


def damages(content: bytes, rounds: int) -> list[bytes]:
    draw = random.Random(0)
    versions = [b"", content[: len(content) // 2], content[:-3], content + b"\0", b"\xff" + content]
    for _ in range(rounds):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 1, 8))):
            changed[draw.randrange(len(changed))] = draw.choice(
                (draw.randrange(256), draw.choice(b'0123456789-:,"{[e.'))
            )
        versions.append(bytes(changed))
    return versions


@pytest.mark.parametrize("name", [*TEXTS, "samples.safetensors"])
@pytest.mark.filterwarnings("ignore:.*samples.safetensors is damaged")
def test_damaged_file_is_refused_or_harmless(run: Path, name: str) -> None:
    before, content = contents(run), (run / name).read_bytes()
    refused = 0
    for damaged in damages(content, rounds=120):
        (run / name).write_bytes(damaged)
        values, error = outcome(contents, run)
        if error is not None:
            assert name in str(error)
            refused += 1
        else:
            if name == "samples.safetensors" and not values[3]:  # left out, with a warning
                refused += 1
                values[3] = before[3]
            assert values == before, damaged
    assert refused > 100


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file and give it a valid checksum."""
    content = read_json(path, "")
    change(content)
    path.write_text(json.dumps({**content, CHECKSUM: json_checksum(content)}))


WRONG_VALUES = [None, True, "x", [], {}, [1], -1, 0, 1e999, float("nan"), 10**400, {"a": {"b": []}}]


@pytest.mark.parametrize("name", ["result.json", "evaluation-test-mean.json"])
def test_forged_values_are_refused_or_shown(run: Path, name: str) -> None:
    """Wrong types with a valid checksum give the right kind of error or a usable run."""
    original = read_json(run / name, "")
    key_paths = [(key,) for key in original] + [("figures", key) for key in original["figures"] if "size" in key]
    for key_path in key_paths:
        for value in WRONG_VALUES:

            def change(content: dict[str, Any], key_path: Any = key_path, value: Any = value) -> None:
                for key in key_path[:-1]:
                    content = content[key]
                content[key_path[-1]] = value

            forge(run / name, change)
            finished, error = outcome(read_run, run)
            if error is not None:
                assert name in str(error)
            else:
                assert all(isinstance(value, float) for value in finished.figures.values())
                outcome(lambda result: list_front_points({"a": [result]}, "parameters"), finished)
                outcome(lambda run: compose_page("", [], tabulate_runs(group_runs([run])), [run]), finished)
            forge(run / name, lambda content: content.update(original))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "config.yaml",
            "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10 if n else '1')}]" for n in range(9)),
            "aliases",
        ),
        ("config.yaml", "!!bool x", "config.yaml is damaged"),
        ("config.yaml", "!!int ''", "config.yaml is damaged"),
        ("config.yaml", "!!timestamp x", "config.yaml is damaged"),
        ("config.yaml", "2020-99-99: 1", "config.yaml is damaged"),
        ("config.yaml", "[a," * 5000, "more than 400 brackets"),
        ("config.yaml", "- " * 5000, "config.yaml is damaged"),
        ("config.yaml", "1: 2", "names must be text"),
        ("config.yaml", "# " + "x" * 300_000, "at most 65,536"),
        ("result.json", "[" * 100_000, "result.json is damaged"),
        ("result.json", '{"figures": {}}', "seconds must be"),
        ("result.json", '{"figures": {"a": "b"}, "seconds": 1}', "the figure a is not a number"),
        ("result.json", '{"figures": {}, "seconds": 1, "date": 3}', "date must be"),
        ("evaluation-test-mean.json", '{"figures": [1]}', "it has no figures"),
        ("evaluation-test-mean.json", "3", "it holds no JSON object"),
        ("history.csv", "epoch,member\n0,0\n", "its columns are not epoch, member, rate"),
    ],
)
def test_each_damage_is_one_error_line_naming_the_file(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, reason: str
) -> None:
    (run / name).write_text(content)
    if name == "history.csv":
        forge(run / "result.json", lambda result: result.pop("checksums"))
    assert main(["report", str(run), "--measure", "false", "--out", str(run.parent / "report")]) == 2
    shown = capsys.readouterr().err
    assert reason in shown
    assert shown.startswith(f"sens: {run / name} is damaged: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("field", ["dataset", "seed", "members", "method_arguments", "limit", "changes", "recipe"])
def test_configuration_of_wrong_types_is_refused(run: Path, field: str) -> None:
    config = read_config(run)
    for value in (True, [1], 1.5, {"a": 1}, "x", None):
        allowed = {"dataset": str, "recipe": str, "method_arguments": dict, "changes": dict, "limit": type(None)}
        if isinstance(value, allowed.get(field, int)) and value is not True:
            continue
        write_yaml(run / "config.yaml", {**config, field: value})
        with pytest.raises(ValueError, match=f"config.yaml is damaged: its {field} cannot be"):
            read_config(run)


@pytest.mark.parametrize(
    "row", ["0,0", "0,0,1,1,1,1,1,1", "x,0,1,1,1,1,1", "nan,0,1,1,1,1,1", "0,inf,1,1,1,1,1", ",0,1,1,1,1,1"]
)
def test_damaged_history_without_a_checksum_is_refused(run: Path, row: str) -> None:
    with (run / "history.csv").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(ValueError, match=r"history.csv is damaged"):
        read_history(run, {})


@pytest.mark.parametrize(
    "kept",
    [
        '[[{"group": "1", "size": 1000000000000, "kept": [0]}]]',
        '[[{"group": "1", "size": 4, "kept": [7]}]]',
        '[[{"group": "1", "size": 4, "kept": []}]]',
        '[[{"group": "1", "size": 4, "kept": [1]}], [{"group": "2", "size": 4, "kept": [1]}]]',
        '[[{"group": "1", "size": Infinity, "kept": [1]}]]',
        "[3]",
        "3",
        "{}",
    ],
)
def test_forged_neurons_are_refused(run: Path, kept: str) -> None:
    (run / "subnets.json").write_text(kept)
    with pytest.raises(ValueError, match=r"subnets.json is damaged"):
        read_subnets(run, {})


def test_incomplete_samples_file_warns_and_is_ignored(run: Path) -> None:
    tensors = read_samples(run)
    assert set(tensors) >= {"confidence", "correct", "entropy", "disagreement"}
    path = run / "samples.safetensors"
    save_file(tensors, path)  # as earlier versions wrote it
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_samples(run).items())
    shorter = {**tensors, "entropy": tensors["entropy"][:-1].clone()}
    infinite = {**tensors, "entropy": tensors["entropy"] / 0}
    counted = {**tensors, "correct": tensors["correct"].float()}
    square = {**tensors, "disagreement": torch.zeros(2, 3)}
    for changed in ({"confidence": tensors["confidence"]}, shorter, square, infinite, counted):
        save_file(changed, path)
        with pytest.warns(UserWarning, match="samples.safetensors is damaged"):
            assert read_samples(run) == {}
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="is damaged"):
        assert read_samples(run) == {}


@pytest.mark.parametrize("name", TEXTS)
def test_special_files_do_not_hang(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=f"{name} is damaged: it is a pipe, not a regular file"):
        contents(run)
    assert time.perf_counter() - start < 5


def test_records_of_earlier_versions_are_read(run: Path) -> None:
    """They have no checksums."""
    before = contents(run)
    for name in ("result.json", "evaluation-test-mean.json"):
        content = json.loads((run / name).read_text())
        content.pop("sha256")
        content.pop("checksums", None)
        (run / name).write_text(json.dumps(content))
    (run / "config.yaml").write_text(yaml.safe_dump(before[0]))
    after = contents(run)
    before[1].pop("checksums")
    assert after == before


def test_merged_evaluation_keeps_other_figures(run: Path) -> None:
    path = evaluation_path(run)
    record = read_json(path, "")
    assert merge_figures(path, {"adv/fgsm@0.1": 0.5}, {"split": "test"}) == {**record["figures"], "adv/fgsm@0.1": 0.5}
    assert {**read_json(path, ""), "figures": record["figures"]} == record
    assert read_figures(path)["adv/fgsm@0.1"] == 0.5


def test_forged_continual_results_are_refused(tmp_path: Path) -> None:
    matrix = {"rows": [[0.5], [0.5, 1.0]], "unaided": 0.5, "inferred": 0.5}
    memory = dict.fromkeys(("backbone", "factors", "masks", "heads", "stored_masks"), 3)
    capacity = {"sizes": {"a": 4}, "taken": {"a": [1, 2]}, "free": {"a": 1}, "tasks": [0, 1]}
    result = {"figures": {"accuracy": 0.5, "final_accuracy": 0.5}, "matrix": matrix, "memory": memory}
    result |= {"capacity": capacity, "file_bytes": 3, "seconds": 1.0, "date": "2026-11-16", "device": "CPU"}
    result["versions"] = {}
    path = tmp_path / "result.json"
    write_json(path, result)
    assert read_continual_result(tmp_path) == result
    write_json(path, {**result, "capacity": None})
    assert read_continual_result(tmp_path)["capacity"] is None
    forged: list[dict[str, Any]] = [
        {key: value} for key in ("matrix", "memory", "capacity", "file_bytes") for value in WRONG_VALUES[2:7]
    ]
    forged += [{"matrix": {**matrix, "rows": value}} for value in (None, [[1.0], [1.0]], [["a"]], [[None]], 3, [3])]
    forged += [{"matrix": {**matrix, "unaided": value}} for value in ("a", [], {})]
    forged += [{"memory": {**memory, "heads": value}} for value in (None, "a", -1, 1e999)]
    forged += [
        {"capacity": {**capacity, name: value}} for name in ("sizes", "taken") for value in (None, 3, {"b": [1]})
    ]
    forged += [{"capacity": {**capacity, "tasks": [0]}}, {"figures": {"accuracy": 0.5}}]
    for changes in forged:
        write_json(path, {**result, **changes})
        with pytest.raises(ValueError, match=r"result.json is damaged"):
            read_continual_result(tmp_path)
    for key in result:
        write_json(path, {name: value for name, value in result.items() if name != key})
        with pytest.raises(ValueError, match=r"result.json is damaged"):
            read_continual_result(tmp_path)


def test_damaged_result_of_a_finished_run_is_reported_by_train(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_result(run)["figures"]
    forge(run / "result.json", lambda result: result.pop("seconds"))
    config = read_config(run)
    command = ["train", "--model", "mlp", "--epochs", "2", "--members", "2", "--quiet", "true", "--out", str(run)]
    for name in ("model_arguments", "method_arguments"):
        command += [f"--{name}", json.dumps(config[name])]
    assert main(command) == 2
    assert "result.json is damaged: seconds must be" in capsys.readouterr().err
    assert se.Ensemble.load(run / "ensemble.safetensors")
