"""Data sets by name, from tiny archives in the official formats."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import socket
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.io import savemat

from structured_ensembles.data import cache, sources
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.sources import data_sets, is_cached, load_data
from tests.support.archives import picture, tiny_imagenet

TRAIN, TEST = 10, 5  # samples; CIFAR-10 wants a multiple of its five batches
Arrays = tuple[np.ndarray, np.ndarray]


def source_of(path: Path) -> str:
    """Read where the contents of a cached data set come from."""
    with safe_open(path, framework="np") as file:
        return str(file.metadata()["source"])


def pixels(split: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw images (samples, channels, height, width) that differ from their transposes."""
    count, seed = (TRAIN, 0) if split == "train" else (TEST, 1)
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(split: str, classes: int) -> np.ndarray:
    """Cycle through the last tenth of the labels, so that the last class occurs."""
    return (classes - 1) - np.arange(TRAIN if split == "train" else TEST) % min(classes, 10)


def tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def write_cifar10(downloads: Path, train: Arrays, test: Arrays) -> list[str]:
    names = [f"class {label}" for label in range(10)]

    def records(images: np.ndarray, own_labels: np.ndarray) -> bytes:
        return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, own_labels, strict=True))

    folder, share = "cifar-10-batches-bin", TRAIN // 5
    batches = [
        records(train[0][start : start + share], train[1][start : start + share]) for start in range(0, TRAIN, 2)
    ]
    members = {f"{folder}/data_batch_{number}.bin": batch for number, batch in enumerate(batches, 1)}
    members = dict(reversed(members.items()))  # an archive may hold its members in any order
    members |= {"../escape.bin": b"no", f"{folder}/test_batch.bin": records(*test)}
    tar(
        downloads / "cifar-10-binary.tar.gz", members | {f"{folder}/batches.meta.txt": "\n".join([*names, ""]).encode()}
    )
    return names


def write_cifar100(downloads: Path, train: Arrays, test: Arrays) -> list[str]:
    names = [f"fine {label}" for label in range(100)]

    def records(images: np.ndarray, own_labels: np.ndarray) -> bytes:
        return b"".join(bytes([7, label]) + image.tobytes() for image, label in zip(images, own_labels, strict=True))

    members = {"train.bin": records(*train), "test.bin": records(*test), "coarse_label_names.txt": b"coarse\n" * 20}
    members["fine_label_names.txt"] = "\n".join(names).encode()
    tar(downloads / "cifar-100-binary.tar.gz", {f"cifar-100-binary/{name}": value for name, value in members.items()})
    return names


def write_idx(downloads: Path, train: Arrays, test: Arrays, folder: str) -> None:
    (downloads / folder).mkdir()
    for stem, (images, own_labels) in (("train", train), ("t10k", test)):
        header = struct.pack(">IIII", 0x803, len(images), 28, 28)
        (downloads / folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">II", 0x801, len(own_labels))
        content = gzip.compress(header + own_labels.astype(np.uint8).tobytes())
        (downloads / folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(content)


def write_mnist(downloads: Path, train: Arrays, test: Arrays) -> list[str]:
    write_idx(downloads, train, test, "mnist")
    return list("0123456789")


def write_fashion(downloads: Path, train: Arrays, test: Arrays) -> list[str]:
    write_idx(downloads, train, test, "fashion-mnist")
    return ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def write_svhn(downloads: Path, train: Arrays, test: Arrays) -> list[str]:
    for stem, (images, own_labels) in (("train", train), ("test", test)):
        stored_labels = np.where(own_labels == 0, 10, own_labels)[:, None].astype(np.uint8)
        savemat(
            downloads / f"{stem}_32x32.mat",
            {"X": images.transpose(2, 3, 1, 0), "y": stored_labels},
            do_compression=True,
        )
    return list("0123456789")


WRITERS: dict[str, Callable[[Path, Arrays, Arrays], list[str]]] = {
    "mnist": write_mnist,
    "fashion-mnist": write_fashion,
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "svhn": write_svhn,
}


def expect(monkeypatch: pytest.MonkeyPatch, name: str, downloads: Path, url: str = "", **fields: int) -> None:
    """Describe the data set as the archives under `downloads` have it, not as the official ones do."""
    info = sources.DATA_SETS[name]
    archives = [
        replace(
            archive,
            md5=hashlib.md5((downloads / archive.file).read_bytes()).hexdigest(),
            sha256=hashlib.sha256((downloads / archive.file).read_bytes()).hexdigest(),
            # Nothing in these tests may reach for the real servers.
            url=(url or "http://127.0.0.1:9/") + (archive.file if url else archive.file.rsplit("/", 1)[-1]),
        )
        for archive in info.archives
    ]
    fields = {"train": TRAIN, "test": TEST} | fields
    monkeypatch.setitem(sources.DATA_SETS, name, replace(info, archives=tuple(archives), **fields))


def prepare(monkeypatch: pytest.MonkeyPatch, name: str, root: Path) -> tuple[Arrays, Arrays, list[str]]:
    """Write archives of a tiny data set under `root`; return their contents."""
    info = data_sets()[name]
    train, test = ((pixels(split, info.shape), labels(split, info.num_classes)) for split in ("train", "test"))
    downloads = root / "downloads"
    downloads.mkdir(parents=True)
    names = WRITERS[name](downloads, train, test)
    expect(monkeypatch, name, downloads)
    return train, test, names


def check(data: Data, train: Arrays, test: Arrays, names: list[str]) -> None:
    for split, (images, own_labels) in ((data.train, train), (data.test, test)):
        assert split is not None
        assert split.inputs.dtype == torch.uint8
        np.testing.assert_array_equal(split.inputs.numpy(), images)
        np.testing.assert_array_equal(split.targets.numpy(), own_labels)
    assert list(data.classes) == names


@pytest.mark.parametrize("name", WRITERS)
def test_archives_are_parsed_once_then_read_from_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test, names = prepare(monkeypatch, name, tmp_path)
    assert not is_cached(name, tmp_path)
    check(load_data(name, tmp_path), train, test, names)
    assert is_cached(name, tmp_path)
    for archive in data_sets()[name].archives:
        (tmp_path / "downloads" / archive.file).unlink()
        assert f"{archive.file} md5 {archive.md5}" in source_of(tmp_path / f"{name}.safetensors")
    again = load_data(name, str(tmp_path))
    check(again, train, test, names)
    assert again.name == name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["downloads", f"{name}.safetensors"])


def test_tiny_imagenet_is_read_with_its_class_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    words = "n01\tcrane, bird\nn02\tcrane, machine\nn09\tnot asked for\nn03\tgoldfish, Carassius auratus\n"
    classes = ["n03", "n01", "n02", "n04"]
    tiny_imagenet(downloads / "tiny-imagenet-200.zip", classes, picture, words)
    expect(monkeypatch, "tiny-imagenet", downloads, train=8, test=4, num_classes=4)
    data = load_data("tiny-imagenet", tmp_path)
    assert data.classes == ("goldfish", "crane, bird", "crane, machine", "n04")
    assert data.train.targets.tolist() == [1, 1, 2, 2, 0, 0, 3, 3]  # in the order of the files' names
    assert data.test is not None
    assert data.test.targets.tolist() == [3, 2, 1, 0]  # in the order of val_annotations.txt
    numbers = [10, 11, 20, 21, 0, 1, 30, 31]
    splits = [(data.train.inputs, numbers), (data.test.inputs, [103, 102, 101, 100])]
    for images, of in splits:
        assert images.shape == (len(of), 3, 64, 64)
        for image, number in zip(images.numpy(), of, strict=True):
            original = np.asarray(picture(number).convert("RGB")).transpose(2, 0, 1)
            assert np.abs(image.astype(int) - original).mean() < 3  # JPEG is lossy
            assert (image[0] == image[1]).all() == bool(number % 2)


@pytest.mark.parametrize(
    ("classes", "image", "num_classes", "message"),
    [
        (["n01", "n0 2"], picture, 2, "does not list the class n0 2"),
        (["n01", "n02"], lambda number: picture(number).resize((63, 64)), 2, "63×64 pixels"),
        (["n01", "n02"], picture, 3, "names 2 classes, not 3"),
    ],
)
def test_unexpected_tiny_imagenet_archive_is_refused(
    classes: list[str],
    image: Callable[[int], Image.Image],
    num_classes: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    tiny_imagenet(downloads / "tiny-imagenet-200.zip", classes, image, None)
    expect(monkeypatch, "tiny-imagenet", downloads, train=4, test=2, num_classes=num_classes)
    with pytest.raises(ValueError, match=message):
        load_data("tiny-imagenet", tmp_path)
    assert not is_cached("tiny-imagenet", tmp_path)


def test_data_set_table_matches_the_data_and_has_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = data_sets()
    assert list(table) == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "tiny-imagenet"]
    assert all(name == info.name for name, info in table.items())
    files = [archive.file for info in table.values() for archive in info.archives]
    assert len(files) == len(set(files)) == 13
    for archive in (archive for info in table.values() for archive in info.archives):
        assert len(bytes.fromhex(archive.md5)) == 16
        assert len(bytes.fromhex(archive.sha256)) == 32, archive.url  # none may come over http by md5 alone
    digits, info = load_data("digits"), table["digits"]
    assert digits.test is not None
    assert (len(digits.train.inputs), len(digits.test), digits.shape) == (info.train, info.test, info.shape)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_cached("digits")
    assert not is_cached("cifar10")
    table.clear()
    assert data_sets()
    with pytest.raises(ValueError, match=r"name must be one of 'digits', 'mnist', .* not 'imagenet'"):
        load_data("imagenet")
    with pytest.raises(ValueError, match="name must be one of"):
        is_cached("../digits")


def test_default_root_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train, test, names = prepare(monkeypatch, "svhn", tmp_path / ".cache/structured-ensembles")
    check(load_data("svhn"), train, test, names)
    check(load_data("svhn", "~/.cache/structured-ensembles"), train, test, names)
    assert (tmp_path / ".cache/structured-ensembles/svhn.safetensors").exists()


def test_cache_is_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "cifar10", tmp_path)
    data = load_data("cifar10", tmp_path)
    with open("/proc/self/maps") if os.path.exists("/proc/self/maps") else contextlib.nullcontext() as file:
        if file is None:
            pytest.skip("only Linux lists what is mapped")
        mapped = [line.split()[0].split("-") for line in file if line.rstrip().endswith("cifar10.safetensors")]
    assert data.test is not None
    for images in (data.train.inputs, data.test.inputs):
        assert any(int(low, 16) <= images.data_ptr() < int(high, 16) for low, high in mapped)


def test_cache_from_elsewhere_keeps_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, names = prepare(monkeypatch, "svhn", tmp_path / "official")
    tensors = {"train.images": train[0], "train.labels": train[1], "test.images": test[0], "test.labels": test[1]}
    metadata = {"name": "svhn", "classes": json.dumps(names), "source": "re-derived"}
    save_file(tensors, tmp_path / "svhn.safetensors", metadata)
    check(load_data("svhn", tmp_path), train, test, names)
    assert source_of(tmp_path / "svhn.safetensors") == "re-derived"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(monkeypatch, "mnist", tmp_path)
    load_data("mnist", tmp_path)
    return tmp_path / "mnist.safetensors"


def refused(path: Path, reason: str = "damaged") -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        load_data("mnist", path.parent)
    message = str(caught.value)
    assert str(path) in message
    assert "delete it" in message
    assert "\n" not in message


def test_truncated_cache_is_refused(cached: Path) -> None:
    content = cached.read_bytes()
    for length in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        cached.write_bytes(content[:length])
        refused(cached)
    cached.write_bytes(content + b"\0")
    refused(cached)
    cached.write_bytes(b"<html>not found</html>")
    refused(cached)


def test_flipped_bits_never_change_the_data(cached: Path) -> None:
    content = cached.read_bytes()
    tensors = load_file(cached)
    length = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    survived = 0
    positions = [*range(0, length, 2), *generator.integers(length, len(content), 300).tolist()]
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        other = cached.with_name("other")
        other.write_bytes(damaged)
        os.replace(other, cached)  # the file that is mapped may not change
        try:
            data = load_data("mnist", cached.parent)
        except ValueError:
            refused(cached)
            continue
        survived += 1  # a letter of "sha256", or a space at the end of the header
        assert data.classes == tuple("0123456789")
        assert source_of(cached) == sources.DATA_SETS["mnist"].source
        assert data.test is not None
        for tensor, name in (
            (data.train.inputs, "train.images"),
            (data.train.targets, "train.labels"),
            (data.test.inputs, "test.images"),
            (data.test.targets, "test.labels"),
        ):
            np.testing.assert_array_equal(tensor.numpy(), tensors[name])
    assert survived < 20


def test_cache_is_verified_once_per_process_and_after_a_change(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[str]()
    checksum = cache.checksum
    monkeypatch.setattr(cache, "checksum", lambda *arguments: checked.append("") or checksum(*arguments))
    load_data("mnist", cached.parent)
    assert not checked  # the fixture has loaded it
    other = cached.with_name("other")
    other.write_bytes(cached.read_bytes())
    os.replace(other, cached)
    for _ in range(3):
        load_data("mnist", cached.parent)
    assert len(checked) == 1


def test_cache_with_other_tensors_is_refused(cached: Path) -> None:
    with safe_open(cached, framework="np") as file:
        metadata = file.metadata()
    save_file(load_file(cached) | {"train.more": np.zeros(1)}, cached, metadata)
    refused(cached, "train.more")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are a matter of POSIX")
def test_pipe_in_place_of_a_cache_is_refused(cached: Path) -> None:
    cached.unlink()
    os.mkfifo(cached)
    refused(cached, "pipe")


@pytest.mark.parametrize(
    ("change", "metadata", "reason"),
    [
        ({"train.labels": None}, {}, "train.labels"),
        ({"train.images": lambda images: images.astype(np.float32)}, {}, "train.images is torch.float32"),
        ({"train.images": lambda images: images[:, 0]}, {}, "train.images is torch.uint8 of shape"),
        ({"test.images": lambda images: images[:-1]}, {}, "test.images"),
        ({"test.labels": lambda labels: labels.astype(np.int32)}, {}, "test.labels is torch.int32"),
        ({"test.labels": lambda labels: labels + 1}, {}, "test.labels reach from 6 to 10, not from 0 to 9"),
        ({"train.labels": lambda labels: labels - 1}, {}, "train.labels reach from -1 to 8"),
        ({}, {"name": "svhn"}, "name 'svhn' is not 'mnist'"),
        ({}, {"classes": "[1, 2"}, "mnist.safetensors is damaged"),
        ({}, {"classes": '{"0": 1}'}, "must be a list of names"),
        ({}, {"classes": '["0"]'}, "names 1 classes, not 10"),
        ({}, None, "name None"),
    ],
)
def test_cache_of_another_format_is_refused(
    change: dict[str, Callable[[np.ndarray], np.ndarray] | None],
    metadata: dict[str, str] | None,
    reason: str,
    cached: Path,
) -> None:
    tensors = load_file(cached)
    for name, function in change.items():
        tensor = tensors.pop(name)
        if function is not None:
            tensors[name] = np.ascontiguousarray(function(tensor))
    complete = {"name": "mnist", "classes": json.dumps(list("0123456789")), "source": "a test"}
    save_file(tensors, cached, None if metadata is None else complete | metadata)
    refused(cached, reason)


@pytest.mark.parametrize("step", ["save_file", "os.fsync", "os.replace"])
def test_interrupted_cache_write_leaves_no_file(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, names = prepare(monkeypatch, "mnist", tmp_path)

    def interrupt(*arguments: object, **options: object) -> None:
        if step == "save_file":
            Path(str(arguments[1])).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"structured_ensembles.storage.files.{step}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_data("mnist", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]
    check(load_data("mnist", tmp_path), train, test, names)


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_cache_permissions_follow_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "mnist", tmp_path)
    before = os.umask(0o027)
    try:
        load_data("mnist", tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "mnist.safetensors").stat().st_mode & 0o777 == 0o640


def test_archives_with_other_contents_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "cifar10", tmp_path)
    downloads = tmp_path / "downloads"
    archive = downloads / "cifar-10-binary.tar.gz"

    def fails(name: str, message: str) -> None:
        expect(monkeypatch, name, downloads)
        with pytest.raises(ValueError, match=message) as caught:
            load_data(name, tmp_path)
        assert str(downloads) in str(caught.value)
        assert not is_cached(name, tmp_path)

    folder = "cifar-10-batches-bin"
    complete = {f"{folder}/data_batch_{number}.bin": bytes(2 * 3073) for number in range(1, 6)}
    complete |= {f"{folder}/test_batch.bin": bytes(5 * 3073), f"{folder}/batches.meta.txt": b"a\n" * 10}
    tar(archive, complete | {f"{folder}/test_batch.bin": bytes(3074)})
    fails("cifar10", "3074 bytes of images")
    tar(archive, complete | {f"{folder}/test_batch.bin": bytes(4 * 3073)})
    fails("cifar10", r"test.images is torch.uint8 of shape \(4, 3, 32, 32\)")
    tar(archive, complete | {f"{folder}/test_batch.bin": b"\x0a" * (5 * 3073)})
    fails("cifar10", "test.labels reach from 10 to 10")
    tar(archive, complete | {f"{folder}/batches.meta.txt": b"a\n"})
    fails("cifar10", "names 1 classes, not 10")
    del complete[f"{folder}/data_batch_3.bin"]
    tar(archive, complete)
    fails("cifar10", "no file cifar-10-batches-bin/data_batch_3.bin")
    with monkeypatch.context() as patch:
        patch.setattr("structured_ensembles.data.archives.LARGEST", 6145)
        fails("cifar10", "6146 bytes, but at most 6145")
    archive.write_bytes(archive.read_bytes()[:60])
    fails("cifar10", "cannot be read as cifar10")
    archive.write_bytes(b"<html>moved</html>")
    fails("cifar10", "cannot be read as cifar10")

    write_idx(downloads, (pixels("train", (1, 28, 28)),) * 2, (pixels("test", (1, 28, 28)),) * 2, "mnist")
    fails("mnist", "train-labels-idx1-ubyte.gz does not have the 10 bytes")
    (downloads / "mnist/train-images-idx3-ubyte.gz").write_bytes(gzip.compress(struct.pack(">4I", 0x803, 2**31, 9, 9)))
    fails("mnist", "claims the shape")
    (downloads / "mnist/train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x0d\x03" + bytes(12)))
    fails("mnist", "train-images-idx3-ubyte.gz is not an idx file")

    write_svhn(downloads, *((pixels(split, (3, 32, 32)), labels(split, 10)) for split in ("train", "test")))
    savemat(downloads / "test_32x32.mat", {"X": np.zeros((32, 32), np.uint8), "y": np.ones(5)})
    fails("svhn", r"test_32x32.mat has images of shape \(32, 32\)")
    savemat(downloads / "test_32x32.mat", {"y": np.ones(5)})
    fails("svhn", "test_32x32.mat cannot be read: the variables X and y have 0 and 5 values")
    (downloads / "test_32x32.mat").write_bytes(b"MATLAB 7.3 MAT-file" + bytes(600))
    fails("svhn", "test_32x32.mat cannot be read")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str, list[str]]]:
    """Serve a folder; give it, its address, and the paths that were requested."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder, asked = tmp_path / "served", list[str]()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, form: str, *arguments: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder / "downloads")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_missing_archives_are_downloaded(
    served: tuple[Path, str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url, asked = served
    train, test, names = prepare(monkeypatch, "mnist", folder)
    expect(monkeypatch, "mnist", folder / "downloads", url)
    root = tmp_path / "root"
    check(load_data("mnist", root), train, test, names)
    assert len(asked) == 4
    check(load_data("mnist", root), train, test, names)
    (root / "mnist.safetensors").unlink()
    (root / "downloads/mnist/t10k-labels-idx1-ubyte.gz").unlink()
    check(load_data("mnist", root), train, test, names)
    assert asked[4:] == ["/mnist/t10k-labels-idx1-ubyte.gz"]


def test_download_with_another_checksum_is_refused(
    served: tuple[Path, str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url, _ = served
    prepare(monkeypatch, "cifar10", folder)
    expect(monkeypatch, "cifar10", folder / "downloads", url)
    file = folder / "downloads/cifar-10-binary.tar.gz"
    file.write_bytes(file.read_bytes() + b"more")
    root = tmp_path / "root"
    with pytest.raises(ValueError, match=f"{url}cifar-10-binary.tar.gz gave .* does not have the sha256") as caught:
        load_data("cifar10", root)
    assert "\n" not in str(caught.value)
    assert list((root / "downloads").iterdir()) == []
    assert not is_cached("cifar10", root)


def test_file_with_another_checksum_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "cifar10", tmp_path)
    file = tmp_path / "downloads/cifar-10-binary.tar.gz"
    expected = hashlib.md5(file.read_bytes()).hexdigest()
    file.write_bytes(b"half of it")
    with pytest.raises(ValueError, match=f"{file} has the md5 checksum .* has {expected}: replace it") as caught:
        load_data("cifar10", tmp_path)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == b"half of it"


def test_archive_with_equal_md5_and_other_sha256_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker could arrange that on a plain http download."""
    prepare(monkeypatch, "cifar10", tmp_path)
    info = sources.DATA_SETS["cifar10"]
    expected = "0" * 64
    other = tuple(replace(archive, sha256=expected) for archive in info.archives)
    monkeypatch.setitem(sources.DATA_SETS, "cifar10", replace(info, archives=other))
    with pytest.raises(ValueError, match=f"has the sha256 checksum .* has {expected}: replace it"):
        load_data("cifar10", tmp_path)
    assert not is_cached("cifar10", tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are a matter of POSIX")
def test_pipe_in_place_of_an_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "cifar10", tmp_path)
    file = tmp_path / "downloads/cifar-10-binary.tar.gz"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="is a pipe, not a regular file: replace it"):
        load_data("cifar10", tmp_path)


def test_offline_error_names_url_and_path(
    served: tuple[Path, str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url, _ = served
    prepare(monkeypatch, "svhn", folder)
    with socket.socket() as listener:  # a port that nobody answers on
        listener.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    for address, reason in ((nobody, "ConnectionError"), (url + "elsewhere/", "HTTPError")):
        expect(monkeypatch, "svhn", folder / "downloads", address)
        with pytest.raises(RuntimeError, match=reason) as caught:
            load_data("svhn", tmp_path / "root")
        message = str(caught.value)
        for file in ("train_32x32.mat", "test_32x32.mat"):
            assert f"{address}{file} at {tmp_path}/root/downloads/{file}" in message
        assert "\n" not in message
        assert not is_cached("svhn", tmp_path / "root")
        assert list((tmp_path / "root/downloads").iterdir()) == []
