"""Atomic writes, regular files only, bounded sizes."""

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as library_save_file

from structured_ensembles.storage import files
from structured_ensembles.storage.files import check_regular, read_text, write_atomically, write_text
from structured_ensembles.storage.safe_yaml import parse_yaml
from structured_ensembles.storage.tensor_file import DTYPES, save_file


def test_killed_writer_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "äöü")
    assert path.read_text(encoding="utf-8") == "äöü"

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text(encoding="utf-8") == "äöü"
    assert list(path.parent.iterdir()) == [path]


WRITER = """
import sys, time
from pathlib import Path
from structured_ensembles.storage.files import write_atomically

def write(temporary):
    temporary.write_text("half")
    print(temporary, flush=True)
    time.sleep(60)

write_atomically(Path(sys.argv[1]), write)
"""


def old(path: Path) -> Path:
    long_ago = time.time() - 2 * files.LEFTOVER_SECONDS
    os.utime(path, (long_ago, long_ago))
    return path


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """A file of a live process stays, whatever its age and namespace; so do other users' files."""
    path = tmp_path / "file.txt"
    kept = [tmp_path / name for name in ("other.txt.part", "file.txt.part", "file.txt.mine.part", "other.txt.1-2.part")]
    for stranger in kept:
        stranger.write_text("not ours")
        old(stranger)
    earlier_version = tmp_path / f"file.txt.{platform.node()}-{os.getpid()}.part"
    earlier_version.write_text("half")
    old(earlier_version)
    link = tmp_path / f"file.txt.{platform.node()}-{'0' * 16}.part"
    link.symlink_to(kept[0])
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        live = old(Path(process.stdout.readline().strip()))
        write_text(path, "whole")
        assert sorted(tmp_path.iterdir()) == sorted([path, live, link, *kept])
        process.kill()
    write_text(path, "again")
    assert sorted(tmp_path.iterdir()) == sorted([path, link, *kept])
    assert path.read_text() == "again"
    assert kept[0].read_text() == "not ours"


def test_old_temporary_files_of_other_machines_are_removed(tmp_path: Path) -> None:
    """Locks do not reach other machines; the age has to decide."""
    temporary = tmp_path / f"file.txt.another.host-{'a' * 16}.part"
    temporary.write_text("half")
    write_text(tmp_path / "file.txt", "whole")
    assert temporary.exists()
    old(temporary)
    write_text(tmp_path / "file.txt", "whole")
    assert not temporary.exists()


def test_temporary_names_are_unpredictable_and_links_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, secret = tmp_path / "file.txt", tmp_path / "secret"
    secret.write_text("secret")
    names = []

    def write(temporary: Path) -> None:
        names.append(temporary.name)
        temporary.write_text("x")

    write_atomically(path, write)
    write_atomically(path, write)
    assert len(set(names)) == 2
    monkeypatch.setattr("structured_ensembles.storage.files.secrets.token_hex", lambda _: "guessed")
    (tmp_path / f"file.txt.{platform.node()}-guessed.part").symlink_to(secret)
    with pytest.raises(FileExistsError):
        write_text(path, "mine")
    assert secret.read_text() == "secret"


def test_link_created_while_writing_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")

    def exchange(temporary: Path) -> None:
        temporary.unlink()
        temporary.symlink_to(secret)

    with pytest.raises(OSError, match="replaced by another process"):
        write_atomically(tmp_path / "file.txt", exchange)
    assert secret.read_text() == "secret"
    assert list(tmp_path.iterdir()) == [secret]

    def exchange_and_save(temporary: Path) -> None:
        exchange(temporary)
        save_file({}, temporary, {})

    with pytest.raises(OSError, match="symbolic link"):
        write_atomically(tmp_path / "file.txt", exchange_and_save)
    assert secret.read_text() == "secret"


def test_rewritten_file_has_the_usual_permissions(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.unlink()
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # as tempfile does

    write_atomically(tmp_path / "made", write)
    write_text(tmp_path / "text", "x")
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "text").stat().st_mode


def test_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_text(link, "after")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("before", "after", False)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    write_text(dangling, "after")
    assert not (tmp_path / "nothing").exists()


@pytest.fixture
def special(tmp_path: Path) -> dict[str, Path]:
    """Make files that are not regular: pipes, devices, links."""
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    where = os.getcwd()
    os.chdir(tmp_path)  # such addresses must be short
    try:
        listener.bind("socket")
    finally:
        os.chdir(where)
        listener.close()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to a device").symlink_to("/dev/null")
    return {
        "pipe": tmp_path / "pipe",
        "socket": tmp_path / "socket",
        "folder": tmp_path / "folder",
        "device": tmp_path / "link to a device",
    }


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="such files are a matter of POSIX")
def test_pipes_and_devices_are_neither_read_nor_replaced(special: dict[str, Path]) -> None:
    for file_type, path in special.items():
        with pytest.raises(OSError, match=f"is a {file_type}, not a"):
            check_regular(path)
        with pytest.raises(OSError, match=file_type):
            read_text(path)
        before = path.lstat()
        with pytest.raises(ValueError, match=rf"is a {file_type}, not a regular file: choose another name"):
            write_text(path, "x")
        assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    folder = special["pipe"].parent
    stdout = folder / "link to stdout"
    stdout.symlink_to("/proc/self/fd/1")  # as /dev/stdout is, which a mistake of ours would replace
    with pytest.raises(ValueError, match="not a regular file"):
        write_text(stdout, "x")
    assert stdout.is_symlink()
    assert {path.name for path in folder.iterdir()} == {path.name for path in (*special.values(), stdout)}


def test_too_large_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes, but at most 100 are read"):
        read_text(path, 100)


def test_safetensors_files_equal_the_librarys(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tensors = {f"{name}.{dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES for name in ("b", "a")}
    tensors |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(3.0), "strided": torch.randn(4, 6)[:, ::2]}
    tensors["channels last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, ours, {"note": 'ä "quoted"\n'})
    library_save_file(contiguous, theirs, metadata={"note": 'ä "quoted"\n'})
    assert ours.read_bytes() == theirs.read_bytes()
    save_file(tensors, ours, {})
    library_save_file(contiguous, theirs)
    assert ours.read_bytes() == theirs.read_bytes()
    assert torch.equal(load_file(ours)["strided"], tensors["strided"])
    with pytest.raises(ValueError, match=r"a is a torch\.sparse_coo tensor"):
        save_file({"a": torch.eye(2).to_sparse()}, ours, {})


def bomb(levels: int, width: int) -> str:
    rows = ["a0: &a0 [x]"]
    rows += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]" for level in range(1, levels)]
    return "\n".join(rows)


def test_yaml_bombs_are_refused() -> None:
    merged = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    for text, reason in (
        (bomb(12, 10), "its aliases expand to more than 100,000 values"),
        ("\n".join(merged), "aliases"),
        ("a: &a [*a]", "contain themselves"),
        ("[" * 10_000, "brackets"),
        ("a: 2020-03-32", "day"),
        ("a: " + "9" * 5000, "digits"),
        ("a: [1", "expected"),
        ("? [a]\n: 1", "unhashable|hashable"),
        ("x" * 2**21, "at most"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            parse_yaml(text)
        assert len(str(caught.value)) < 500


def test_ordinary_yaml_is_read() -> None:
    assert parse_yaml("base: &base {rate: 0.1}\nother: {<<: *base, epochs: 2}\nlist: [*base, *base]") == {
        "base": {"rate": 0.1},
        "other": {"rate": 0.1, "epochs": 2},
        "list": [{"rate": 0.1}, {"rate": 0.1}],
    }
    assert parse_yaml("") is None
