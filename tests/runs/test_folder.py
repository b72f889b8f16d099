"""Run folders: one process at a time, nothing of a live run deleted, no folder lost by a kill."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from structured_ensembles.runs import folder as runs
from structured_ensembles.runs.folder import open_run, read_config
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.storage import run_lock as locks
from structured_ensembles.storage.run_files import write_json
from structured_ensembles.storage.run_lock import LOCK, run_lock

CONFIG = {"dataset": "digits", "model": "mlp", "method": "single", "seed": 0}
CONFIG |= {"members": 1, "model_arguments": {}, "method_arguments": {}}


def in_another_process(work: Callable[[], object]) -> int:
    """Run `work` in a child process; return 0, 1 if it raised a ValueError, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            work()
            status = 0
        except ValueError:
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def begin(folder: Path) -> None:
    with open_run(folder, CONFIG):
        (folder / "checkpoint.safetensors").write_text("some epochs")


def fail_at_once(folder: Path, **changes: object) -> None:
    with open_run(folder, {**CONFIG, **changes}):
        raise ValueError("a mistake")


@pytest.mark.parametrize("moment", ["replace", "fsync", "open"])
def test_kill_during_the_first_write_leaves_a_usable_folder(tmp_path: Path, moment: str) -> None:
    folder, original = tmp_path / "run", getattr(os, moment)

    def killing(*arguments: object, **keywords: object) -> object:
        if moment == "open":  # of the lock file: it exists, and is not locked
            original(*arguments, **keywords)
        killed()
        return None

    def run() -> None:
        setattr(os, moment, killing)
        begin(folder)

    assert in_another_process(run) == -signal.SIGKILL
    assert folder.exists()
    assert not (folder / "config.yaml").exists()
    begin(folder)
    assert read_config(folder) == CONFIG
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "checkpoint.safetensors"}


def test_temporary_files_of_any_machine_do_not_block_a_folder(tmp_path: Path) -> None:
    for name in ("config.yaml.elsewhere-4711.part", "config.yaml.x7f3kq.part", ".config.yaml.k2.part", LOCK):
        (tmp_path / name).write_text("half a con")
    begin(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "checkpoint.safetensors"}


def test_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.part").write_text("do not touch")
    with pytest.raises(ValueError, match="not empty and not a run folder"):
        begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.part"]
    with pytest.raises(ValueError, match="is a file, not a folder"):
        begin(tmp_path / "thesis.part")


def test_second_process_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with open_run(folder, CONFIG):
        assert in_another_process(lambda: fail_at_once(folder)) == 1
        assert in_another_process(lambda: fail_at_once(folder, seed=1)) == 1
        with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on .*choose another"):
            begin(folder)
        assert read_config(folder) == CONFIG
    begin(folder)


def test_run_finished_by_another_process_meanwhile_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    result = {"figures": {}, "seconds": 1.0, "date": "2026-11-16", "device": "CPU", "versions": {}}

    @contextmanager
    def slow_lock(path: Path) -> Iterator[None]:
        begin(folder)
        write_json(folder / "result.json", result)
        yield

    monkeypatch.setattr(
        runs, "run_lock", lambda path: monkeypatch.undo() or slow_lock(path)
    )  # `_begin_run` runs under a lock too
    with open_run(folder, CONFIG) as done:
        assert done == result


def test_error_before_any_work_removes_the_folder_and_later_errors_keep_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake"):
        fail_at_once(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    begin(tmp_path / "run")
    with pytest.raises(ValueError, match="a mistake"):
        fail_at_once(tmp_path / "run")
    assert read_config(tmp_path / "run") == CONFIG


def test_records_name_the_device_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with two GPUs, also where a command was told to use the CPU."""
    names = {0: "NVIDIA H200", 1: "NVIDIA A100"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[torch.device(device).index or 0])
    assert describe_machine("cpu")["device"] == f"CPU, {torch.get_num_threads()} threads"
    assert describe_machine(torch.device("cuda:1"))["device"] == "NVIDIA A100"
    assert describe_machine("cuda")["device"] == "NVIDIA H200"


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    def run() -> None:
        with open_run(tmp_path / "run", CONFIG):
            killed()

    assert in_another_process(run) == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK).exists()
    begin(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


def test_locks_exclude_each_other_while_folders_are_removed(tmp_path: Path) -> None:
    """Each holder removes lock and folder at its end; a lock on a removed file must not count."""
    counter, folder, rounds = tmp_path / "counter", tmp_path / "run", 60
    counter.write_text("0")

    def count() -> None:
        done = 0
        while done < rounds:
            try:
                with run_lock(folder):
                    counter.write_text(str(int(counter.read_text()) + 1))
            except ValueError as error:
                if "is in use" not in str(error):
                    os._exit(4)
                continue
            done += 1

    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                count()
                os._exit(0)
            finally:
                os._exit(3)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert counter.read_text() == str(3 * rounds)


def test_system_without_file_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.warns(UserWarning, match="cannot be locked on this system"):
        begin(tmp_path / "run")
    assert read_config(tmp_path / "run") == CONFIG


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where folders cannot be created")
def test_folder_that_cannot_be_created_fails_and_is_not_retried_for_ever() -> None:
    with pytest.raises(FileNotFoundError, match="/proc/run"), run_lock(Path("/proc/run")):
        pass


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config\.yaml$"):
        read_config(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"no config\.yaml; the folders in it are, such as .*/a$"):
        read_config(tmp_path)
