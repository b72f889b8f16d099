"""`sens`: damaged run folders, files of options, wrong options, and lists."""

import shutil
import signal
from pathlib import Path

import pytest
import yaml

from structured_ensembles.cli import main as main_module
from structured_ensembles.cli.main import main
from tests.support.command_lines import QUICK


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.yaml", "a: [1", "config.yaml is damaged"),
        ("config.yaml", "hello", "config.yaml is damaged: it says nothing of dataset, model, method, seed"),
        ("config.yaml", "", "config.yaml is damaged"),
        ("config.yaml", "dataset: digits\nmodel: mlp\nmethod: deep", "says nothing of seed"),
        ("result.json", "{}", "result.json is damaged: it has no figures"),
        ("result.json", "[]", "result.json is damaged"),
    ],
)
def test_damaged_run_folder_is_an_error_naming_the_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, reason: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / name).write_text(content)
    assert main(["report", str(copy), "--out", str(tmp_path / "report")]) == 2
    assert reason in capsys.readouterr().err
    assert main(["train", *QUICK, "--out", str(copy)]) == 2
    assert reason in capsys.readouterr().err


def test_reproduce_smoke_refuses_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "table-accuracy", "--smoke", "--dataset", "cifar10"]) == 2
    assert "leave out --dataset" in capsys.readouterr().err


def test_config_file_accepts_any_option(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    options = {"model": "mlp", "epochs": 1, "members": 2, "prune": 0.7, "quiet": True, "changes": {"rate": 0.05}}
    config.write_text(yaml.safe_dump(options))
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "run")]) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["method_arguments"] == {"prune": 0.7}
    assert saved["changes"] == {"rate": 0.05, "epochs": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "imagenet"], "dataset must be one of"),
        (["--model", "resnet1000"], "model must be one of"),
        (["--model", "lenet5-backbone"], "'lenet5-backbone' is for `sens continual`, use 'lenet5' here"),
        (["--model", "no.such:thing"], "cannot be imported"),
        (["--prune", "1.5"], "prune must be"),
        (["--members", "0"], "members must be"),
        (["--changes", '{"rate": -1}'], "rate must be"),
        (["--changes", '{"ratee": 1}'], "a recipe has no 'ratee'"),
        (["--method", "magic"], "method must be one of single, deep, structured"),
        (["--model_arguments", '{"depth": 3}'], "takes the arguments"),
    ],
)
def test_invalid_options_are_one_error_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--model", "mlp", "--epochs", "1"] if "--model" not in arguments else ["--epochs", "1"]
    assert main(["train", "--out", str(tmp_path / "run"), *quick, *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_binary_config_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["train", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "--config must be a YAML file" in capsys.readouterr().err


def test_models_and_datasets_list_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "128,796,352" in shown
    assert "package.module:function" in shown
    assert main(["datasets"]) == 0
    assert "tiny-imagenet" in capsys.readouterr().out


def test_a_second_control_c_does_not_interrupt_the_end_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> int:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(main_module.COMMANDS, "stop", stop)
    monkeypatch.setattr(main_module, "_run", lambda words: main_module.COMMANDS[words[0]]())
    try:
        assert main(["stop"]) == 130
        assert signal.getsignal(signal.SIGINT) == before  # called by a program that goes on
        monkeypatch.setattr("sys.argv", ["sens", "stop"])
        assert main() == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
