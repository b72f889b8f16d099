"""How `sens` parses its command line: options, config files, user code, and the commands it prints."""

import inspect
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from structured_ensembles.cli import main as command
from structured_ensembles.cli.main import main

QUICK = ["--model", "mlp", "--epochs", "1", "--members", "2", "--quiet"]
MINE = """
import torch
import structured_ensembles as se
from torch import nn

def net(width: int = 12) -> nn.Module:
    from layers_of_{name} import Block  # only when it is called
    return nn.Sequential(nn.Flatten(), Block(64, width), nn.ReLU(), nn.Linear(width, 10))

def data() -> se.Data:
    return se.load_data("digits")
"""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return the options that `sens train`, or another command, gets from a command line."""

    def options(*words: str, name: str = "train") -> dict[str, Any]:
        received: dict[str, Any] = {}
        command_function = command.COMMANDS[name]

        def keep(**options: Any) -> int:
            received.update(options)
            return 0

        keep.__doc__, keep.__signature__ = command_function.__doc__, inspect.signature(command_function)
        keep.__annotations__ = get_type_hints(command_function)
        monkeypatch.setitem(command.COMMANDS, name, keep)
        assert main([name, *words]) == 0
        monkeypatch.setitem(command.COMMANDS, name, command_function)
        return received

    return options


def write(path: Path, **options: Any) -> str:
    path.write_text(yaml.safe_dump(options))
    return str(path)


def test_options_override_the_config_file_in_any_order(tmp_path: Path, parse: Callable[..., dict[str, Any]]) -> None:
    path = write(tmp_path / "a.yaml", members=7, seed=3, model="mlp")
    for words in (
        ["--members", "2", "--config", path],
        ["--config", path, "--members", "2"],
        ["--members=2", f"--config={path}"],
        [f"--config={path}", "--members=2"],
    ):
        options = parse(*words)
        assert (options["members"], options["seed"], options["model"]) == (2, 3, "mlp")


def test_later_config_file_overrides_the_earlier(tmp_path: Path, parse: Callable[..., dict[str, Any]]) -> None:
    first, second = write(tmp_path / "a.yaml", members=7, seed=3), write(tmp_path / "b.yaml", members=8, epochs=4)
    options = parse("--config", first, "--epochs", "9", "--config", second)
    assert (options["members"], options["seed"], options["epochs"]) == (8, 3, 9)


def test_list_option_before_config_does_not_consume_it(tmp_path: Path, parse: Callable[..., dict[str, Any]]) -> None:
    path = write(tmp_path / "a.yaml", combine="vote", severities=[1, 2])
    options = parse("--corruptions", "fog", "--config", path, "runs/a", name="evaluate")
    assert options["corruptions"] == ["fog"]
    assert (options["run"], options["combine"], options["severities"]) == (Path("runs/a"), "vote", [1, 2])


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--batch-size", "64"], "batch_size", 64),
        (["--batch-size=64"], "batch_size", 64),
        (["--batch_size", "64"], "batch_size", 64),
        (["--shuffle-labels"], "shuffle_labels", True),
        (["--shuffle-labels=false"], "shuffle_labels", False),
        (["--shuffle_labels"], "shuffle_labels", True),
        (["--shuffle-labels", "no"], "shuffle_labels", False),
        (["--model-arguments", '{"a-b": "c-d"}'], "model_arguments", {"a-b": "c-d"}),
        (["--model-arguments.a-b", "c-d"], "model_arguments", {"a-b": "c-d"}),
        (["--dataset", "tiny-imagenet"], "dataset", "tiny-imagenet"),
        (["--dataset=tiny-imagenet"], "dataset", "tiny-imagenet"),
    ],
)
def test_option_names_accept_dashes_and_underscores(
    words: list[str], option: str, value: Any, parse: Callable[..., dict[str, Any]]
) -> None:
    assert parse(*words, name="continual")[option] == value


def test_dashes_in_config_keys_and_in_image_paths_are_parsed(
    tmp_path: Path, parse: Callable[..., dict[str, Any]]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("batch-size: 64\nmodel_arguments: {a-b: 1}\n")
    options = parse("--config", str(path), name="continual")
    assert (options["batch_size"], options["model_arguments"]) == (64, {"a-b": 1})
    options = parse("--trust-code", "runs/my-run", "--", "my-picture.png", "--my-other.png", name="predict")
    assert options == {
        "run": Path("runs/my-run"),
        "images": [Path("my-picture.png"), Path("--my-other.png")],
        "format": "table",
        "trust_code": True,
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1", "must be a YAML file"),
        (b"- 1", "lines such as `members: 5`"),
        (b"\xff\xfe\x00", "must be a YAML file of options"),
        (b"1: 2", "lines such as"),
        (b"config: other.yaml", "cannot name another file"),
        (None, "must be a YAML file that can be read"),
    ],
)
def test_invalid_config_file_is_an_error(
    content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["train", "--members", "3", "--config", str(path)]) == 2
    assert reason in capsys.readouterr().err


def test_config_file_errors_name_the_option_and_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        ({"member": 3}, "has no option --member: did you mean --members?"),
        ({"members": "many"}, "--members must be a whole number, not 'many'"),
    ):
        assert main(["train", "--config", write(tmp_path / "a.yaml", **options)]) == 2
        assert reason in capsys.readouterr().err
    assert main(["train", "--config"]) == 2
    assert "--config needs a value: a file" in capsys.readouterr().err


def mine(folder: Path, name: str) -> None:
    """Write the modules of a user's own code into a folder."""
    (folder / f"{name}.py").write_text(MINE.replace("{name}", name))
    (folder / f"layers_of_{name}.py").write_text("from torch.nn import Linear as Block\n")


def test_code_in_the_current_folder_is_not_imported_for_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_hidden.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef net(): ...\n")
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.yaml", model="mine_hidden:net")
    assert main(["train", "--out", "run", "--epochs", "1", "--config", path]) == 2
    assert "asks to import mine_hidden:net as model: say --trust-code" in capsys.readouterr().err
    assert main(["train", "--out", "run", "--epochs", "1", "--config", path, "--trust-code"]) == 2
    shown = capsys.readouterr().err
    assert "cannot be imported: No module named 'mine_hidden'; it is in the current folder" in shown
    assert "found with PYTHONPATH=. only" in shown
    assert not Path("imported").exists()


def test_config_file_may_name_code_only_with_trust_code_or_the_same_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("dataset", "model", "method"):
        path = write(tmp_path / "a.yaml", **{option: "os:getcwd"})
        out = ["--out", str(tmp_path / "run")]
        assert main(["train", "--config", path, *out]) == 2
        assert f"asks to import os:getcwd as {option}" in capsys.readouterr().err
        for more in (["--trust-code"], [f"--{option}", "os:getcwd"], [f"--{option}=os:getcwd"]):
            assert main(["train", "--config", path, *out, *more, *QUICK[2:]]) != 0
            assert "asks to import" not in capsys.readouterr().err
    path = write(tmp_path / "a.yaml", ood="os:getcwd")
    assert main(["evaluate", str(tmp_path), "--config", path]) == 2
    assert "asks to import os:getcwd as ood" in capsys.readouterr().err
    path = write(tmp_path / "a.yaml", method=["single", "os:getcwd"])
    assert main(["reproduce", "table-ece", "--config", path]) == 2
    assert "asks to import os:getcwd as method" in capsys.readouterr().err


def hints(shown: str) -> list[str]:
    """Return the commands that a run prints."""
    return [line.strip() for line in shown.partition("Next:\n")[2].splitlines()]


def test_code_in_the_current_folder_is_imported_and_printed_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine(tmp_path, "mine_hinted")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = list(sys.path)
    code_options = ["--model", "mine_hinted:net", "--dataset=mine_hinted:data", "--method", "single"]
    folder = "runs of today/it's own"
    assert main(["train", "--out", folder, *QUICK[2:], *code_options]) == 0
    assert sys.path == before
    evaluate, report = hints(capsys.readouterr().out)
    assert "evaluate" in evaluate
    assert "report" in report
    source = Path(command.__file__).parents[2]
    assert report == evaluate.replace("evaluate", "report")
    # The package need not be installed for tests. One process is enough: the other command differs in one word only
    line = evaluate.replace("PYTHONPATH=.", f"PYTHONPATH=.:{source}")
    completed = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / folder / "evaluation-test-mean.json").exists()
    monkeypatch.syspath_prepend(tmp_path)  # as PYTHONPATH=. does
    assert main(shlex.split(report.partition("structured_ensembles")[2] or report.partition("sens ")[2])) == 0
    assert (tmp_path / "runs" / "report" / "report.html").exists()


def test_printed_commands_of_plain_runs_have_only_the_options_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert (
        main(["train", "--out", str(tmp_path / "a"), *QUICK, "--method", "single", "--root", str(tmp_path / "my data")])
        == 0
    )
    commands = hints(capsys.readouterr().out)
    assert commands == [f"sens {name} {tmp_path}/a --root '{tmp_path}/my data'" for name in ("evaluate", "report")]
    assert main(commands[0].replace("'", "").replace("my data", "my").split()[1:]) == 0
    capsys.readouterr()
    quick = ["--method", "naive", "--epochs", "1", "--tasks", "2", "--quiet"]
    assert main(["continual", "--out", str(tmp_path / "b"), *quick]) == 0
    (line,) = hints(capsys.readouterr().out)
    assert line == f"sens report {tmp_path}/b"
    assert main([*line.split()[1:], "--out", str(tmp_path / "report")]) == 0


def test_python_m_does_not_import_code_in_the_current_folder_for_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_ran.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef net(): ...\n")
    path = write(tmp_path / "a.yaml", model="mine_ran:net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    monkeypatch.setattr(sys, "argv", ["sens", "train", "--config", path, "--trust-code"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("structured_ensembles", run_name="__main__")
    assert ended.value.code == 2
    assert "No module named 'mine_ran'" in capsys.readouterr().err
    assert not Path("imported").exists()
