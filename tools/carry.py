"""Carry the queue of runs to a machine with a GPU, and its results back.

    python tools/carry.py pack cifar10 --out carry        here: write code, data and unfinished runs to carry/
    python carry/carry.py run carry --minutes 25          there: work through the queue, write carry/back
    python tools/carry.py unpack carry/back               here: move finished runs and checkpoints to results/

The machine needs Python, PyTorch and the dependencies of structured-ensembles; if it cannot reach PyPI,
`pack --packages pooch==1.9.0 …` adds packages without compiled code. `--mib` limits the size of data files for
slow or limited transfers; copy all of them before `run`. Options that `run` does not know go to `sens reproduce queue`.
`run --mps` starts NVIDIA's Multi-Process Service, so that parallel runs share the GPU.

Images are packed as lossless WebP, at about half their size. carry/back has the configuration, results, history and
figures of finished runs in one small archive, written anew after each of them: a machine may be lost at any time.
At the end come unfinished runs, which resume from their checkpoints on the next machine: `run --unfinished-mib` says
how much of them you are willing to copy, `run --mib` how large a file may be. Each worker has its share of that; a run
with a larger checkpoint is started only if it can be finished.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
MAX_HEIGHT = 16_000  # pixels of a WebP image
PACKAGES = "packages.tar.gz"
CODE = "code.tar.gz"
FINISHED = "results.tar.gz"
PIECE = "unfinished-{run}.{number}-of-{count}"  # of the archive of an unfinished run, small enough to copy
POLL_SECONDS = 5.0  # between two looks for finished runs
ENDING_SECONDS = 5.0  # for the command to end by itself, when it was interrupted as this program was


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    pack = commands.add_parser("pack", help="write the folder to copy to the machine")
    pack.add_argument("datasets", nargs="*", help="data sets by name")
    pack.add_argument("--root", type=Path, help="where data sets are kept")
    pack.add_argument("--out", type=Path, default=ROOT / "build" / "carry")
    pack.add_argument("--mib", type=float, default=56, help="the largest file of data or of an unfinished run")
    pack.add_argument("--packages", nargs="*", default=[], help="packages that the machine lacks")
    pack.set_defaults(command=pack_all)
    run = commands.add_parser("run", help="on the machine with the GPU")
    run.add_argument("folder", type=Path, help="the folder written by `pack`")
    run.add_argument("--minutes", type=float, default=25)
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--mib", type=float, default=15, help="the largest file of an unfinished run that goes back")
    run.add_argument(
        "--unfinished-mib", type=float, default=60, help="what unfinished runs that go back may take in all"
    )
    run.add_argument("--mps", action="store_true", help="share the GPU through NVIDIA's Multi-Process Service")
    run.add_argument("--work", type=Path, default=Path("/tmp/structured-ensembles"), help="where to unpack and train")
    run.add_argument("--back", type=Path, help="where to write the results; by default FOLDER/back")
    run.set_defaults(command=run_there)
    unpack = commands.add_parser("unpack", help="move the results to results/")
    unpack.add_argument("back", type=Path)
    unpack.set_defaults(command=unpack_back)
    arguments, arguments.options = parser.parse_known_args()
    if arguments.options and arguments.command is not run_there:
        parser.error(f"unrecognized arguments: {' '.join(arguments.options)}")
    arguments.command(arguments)


# Here -----------------------------------------------------------------------------------------------------------------


def pack_all(arguments: argparse.Namespace) -> None:
    """Write code, packages, data and unfinished runs to the folder for the machine."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, out / "carry.py")
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    names = {name for name in files.stdout.decode().splitlines() if name.startswith(("src/", "results/"))}
    with tarfile.open(out / CODE, "w:gz") as archive:
        for name in sorted(names):
            if (ROOT / name).exists():  # git lists deleted files too
                archive.add(ROOT / name, name)
    if arguments.packages:
        target = out / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, *arguments.packages], check=True)
        with tarfile.open(out / PACKAGES, "w:gz") as archive:
            archive.add(target, "packages")
        shutil.rmtree(target)
    for name in arguments.datasets:
        pack_data(name, arguments.root, out, int(arguments.mib * MIB))
    pack_unfinished(unfinished_runs(ROOT / "results"), ROOT / "results", out, arguments.mib)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / MIB:7.1f} MiB  {path}")


def unfinished_runs(results: Path) -> list[list[Path]]:
    """List the files that each unfinished run resumes from: its checkpoint, or its weights if it must be measured."""
    runs = [path.parent for path in sorted(results.glob("*/*/config.yaml"))]
    finished = finished_runs(results)
    return [
        [path for path in sorted(run.iterdir()) if path.suffix in (".safetensors", ".json", ".yaml", ".csv")]
        for run in runs
        if run not in finished
    ]


def pack_data(name: str, root: Path | None, out: Path, limit: int) -> None:
    """Write a cached data set as files NAME.0.part, NAME.1.part, … of at most `limit` bytes."""
    from safetensors import safe_open

    from structured_ensembles.data.cache import cache_path
    from structured_ensembles.data.sources import data_folder

    with safe_open(cache_path(data_folder(root), name), framework="np") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    blocks: dict[str, tuple[str, bytes]] = {}
    shapes = {}
    for key, tensor in tensors.items():
        shapes[key] = (str(tensor.dtype), list(tensor.shape))
        is_coloured = tensor.ndim == 4 and tensor.shape[1] == 3
        rows_per_block = max(1, MAX_HEIGHT // tensor.shape[2]) if is_coloured else len(tensor)
        slices = [tensor[first : first + rows_per_block] for first in range(0, len(tensor), rows_per_block)]
        with ThreadPoolExecutor() as pool:
            encoded = pool.map(encode_webp if is_coloured else lambda rows: rows.tobytes(), slices)
        for number, block in enumerate(encoded):
            blocks[f"{key}/{number:05}"] = ("webp" if is_coloured else "raw", block)
    files: list[list[str]] = [[]]
    size = 0
    for block_name, (_, block) in blocks.items():
        if size + len(block) > limit and files[-1]:
            files.append([])
            size = 0
        files[-1].append(block_name)
        size += len(block)
    for number, names in enumerate(files):
        header_content = {
            "metadata": metadata, "shapes": shapes, "parts": len(files),
            "blocks": [(block_name, blocks[block_name][0], len(blocks[block_name][1])) for block_name in names],
        }  # fmt: skip
        header = json.dumps(header_content).encode()
        body = b"".join(blocks[block_name][1] for block_name in names)
        (out / f"{name}.{number}.part").write_bytes(len(header).to_bytes(8, "little") + header + body)


def encode_webp(images) -> bytes:
    """Encode images uint8 (n, 3, height, width), one above the other, as one lossless WebP."""
    from PIL import Image

    stacked = images.transpose(0, 2, 3, 1).reshape(-1, images.shape[3], 3)
    buffer = io.BytesIO()
    Image.fromarray(stacked).save(buffer, "WEBP", lossless=True, quality=40, method=4, exact=True)
    return buffer.getvalue()


def unpack_back(arguments: argparse.Namespace) -> None:
    """Move finished and unfinished runs to results/ and update the queue."""
    from structured_ensembles.paper.queue import write_queue
    from structured_ensembles.paper.sections import plan_runs
    from structured_ensembles.resuming.folder import CHECKPOINTS
    from structured_ensembles.runs.stopwatch import ELAPSED

    results = ROOT / "results"
    finished_archive = [[path] for path in arguments.back.glob(FINISHED)]
    for pieces in finished_archive + find_unfinished(arguments.back):
        # Finished runs stay: these may have come from another machine, or have been measured further here.
        finished = finished_runs(results)
        with open_pieces(pieces) as archive:
            new = [member for member in archive if (results / member.name).parent not in finished]
            archive.extractall(results, new, filter="data")
        print(*(member.name for member in new if member.name.endswith(("result.json", "safetensors"))), sep="\n")
    for run in finished_runs(results):
        for leftover in (*run.glob(CHECKPOINTS), run / ELAPSED):  # from when it came back unfinished
            leftover.unlink(missing_ok=True)
    write_queue(plan_runs(), results)
    print("see results/queue.yaml; then: sens report results/ --docs, and commit")


# There ----------------------------------------------------------------------------------------------------------------


def run_there(arguments: argparse.Namespace) -> None:
    """Unpack the folder, work through the queue, and pack the results."""
    work, folder = arguments.work.resolve(), arguments.folder.resolve()
    back = (arguments.back or folder / "back").resolve()
    code = [([folder / name], work) for name in (CODE, PACKAGES) if (folder / name).exists()]
    for pieces, target in code + [(pieces, work / "results") for pieces in find_unfinished(folder)]:
        with open_pieces(pieces) as archive:
            # An earlier call has brought the runs in `work` farther than they were when they were packed.
            new = [
                member
                for member in archive
                if work / "results" not in (target / member.name).parents or not (target / member.name).exists()
            ]
            archive.extractall(target, new, filter="data")
    path = [str(work / "src"), str(work / "packages"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    sys.path[:0] = path[:2]
    for first in folder.glob("*.0.part"):
        unpack_data(first.name.removesuffix(".0.part"), folder, work / "data")
    if arguments.mps:
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": str(work / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(work / "mps-log")}
        for name in ("mps", "mps-log"):
            (work / name).mkdir(exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    command = [
        sys.executable, "-m", "structured_ensembles", "reproduce", "queue", "--out", str(work / "results"),
        "--root", str(work / "data"), "--workers", str(arguments.workers), "--minutes", str(arguments.minutes),
        "--checkpoint-mib", str(arguments.unfinished_mib / arguments.workers), "--quiet", *arguments.options,
    ]  # fmt: skip
    try:
        run_and_pack(command, environment, work / "results", back)
    finally:
        if arguments.mps:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, check=False)
        pack_back(work / "results", back, arguments.mib, arguments.unfinished_mib)


def run_and_pack(command: list[str], environment: dict[str, str], results: Path, back: Path) -> None:
    """Run a command; whenever it has finished another run, pack all that are finished.

    So a machine that is taken away, or a command that is killed at a limit, loses only what was under way.
    """
    packed: list[Path] = []
    with subprocess.Popen(command, env=environment) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                finished = finished_runs(results)
                if finished != packed:
                    back.mkdir(parents=True, exist_ok=True)
                    pack_finished(finished, results, back)
                    packed = finished
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)  # a terminal's Ctrl-C reaches the command, too
            process.terminate()
            process.wait()  # leaving `with` after Ctrl-C would wait a quarter of a second only
            raise


def unpack_data(name: str, folder: Path, out: Path) -> None:
    """Write the files NAME.*.part as a cached data set, unless it exists."""
    import numpy as np
    from PIL import Image
    from safetensors.numpy import save_file

    if (out / f"{name}.safetensors").exists():
        return
    blocks: dict[str, tuple[str, bytes]] = {}
    header: dict = {}
    files = sorted(folder.glob(f"{name}.*.part"))
    for path in files:
        content = path.read_bytes()
        first = 8 + int.from_bytes(content[:8], "little")
        if len(content) >= first:
            header = json.loads(content[8:first])
            for block_name, encoding, size in header["blocks"]:
                blocks[block_name] = (encoding, content[first : first + size])
                first += size
        if len(content) != first:
            sys.exit(f"{path} was not copied as a whole: copy it again")
    if len(files) != header["parts"]:
        sys.exit(f"{folder} has {len(files)} of the {header['parts']} files of {name}: copy the others too")

    def decode(block: tuple[str, bytes], dtype: str, shape: list[int]):
        if block[0] == "raw":
            return np.frombuffer(block[1], dtype).reshape(-1, *shape[1:])
        stacked = np.asarray(Image.open(io.BytesIO(block[1])).convert("RGB"))
        return stacked.reshape(-1, shape[2], shape[3], 3).transpose(0, 3, 1, 2)

    tensors = {}
    for key, (dtype, shape) in header["shapes"].items():
        key_blocks = [blocks[block_name] for block_name in sorted(blocks) if block_name.startswith(f"{key}/")]
        with ThreadPoolExecutor() as pool:
            arrays = list(pool.map(lambda block, dtype=dtype, shape=shape: decode(block, dtype, shape), key_blocks))
        tensors[key] = np.ascontiguousarray(np.concatenate(arrays))
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / f"{name}.safetensors", metadata=header["metadata"])


def finished_runs(results: Path) -> list[Path]:
    """List the folders of finished runs: trained, and measured as far as the queue asks for it."""
    from structured_ensembles.paper.queue import is_finished
    from structured_ensembles.paper.sections import plan_runs

    folders = [path.parent for path in sorted(results.glob("*/*/result.json"))]
    trained = [folder for folder in folders if (folder / "config.yaml").exists()]
    planned = {results / run.name: run for run in plan_runs()}
    return [run for run in trained if run not in planned or is_finished(planned[run], results)]


def pack_finished(runs: list[Path], results: Path, back: Path) -> None:
    """Pack the small files of finished runs into one archive, which replaces the one before it when it is complete."""
    from structured_ensembles.paper.queue import KEPT

    files = [run / name for run in runs for name in KEPT if (run / name).exists()]
    write_archive(back / FINISHED, files, results)


def write_archive(path: Path, files: list[Path], results: Path) -> None:
    """Write files below `results` to an archive that appears when it is complete."""
    temporary = path.with_suffix(".part")
    with tarfile.open(temporary, "w:gz") as archive:
        for file in files:
            archive.add(file, file.relative_to(results).as_posix())
    temporary.replace(path)


def pack_back(results: Path, back: Path, mib: float, unfinished_mib: float) -> None:
    """Pack the small files of finished runs into one archive, and unfinished runs as far as there is room for them.

    At any moment `back` has an archive of finished runs, if it had one before. mib, unfinished_mib: the largest file of
    an unfinished run, and all of them together.
    """
    back.mkdir(parents=True, exist_ok=True)
    pack_finished(finished_runs(results), results, back)
    small_enough = []
    room = unfinished_mib * MIB
    for kept in unfinished_runs(results):
        size = sum(path.stat().st_size for path in kept)
        if size <= room:
            small_enough.append(kept)
            room -= size
        else:
            print(f"{size / MIB:7.1f} MiB  left behind: {kept[0].parent}, see --unfinished-mib")
    pack_unfinished(small_enough, results, back, mib)
    for path in sorted(back.iterdir()):
        print(f"{path.stat().st_size / MIB:7.1f} MiB  {path}")


# Unfinished runs ------------------------------------------------------------------------------------------------------


def pack_unfinished(runs: list[list[Path]], results: Path, folder: Path, mib: float) -> None:
    """Pack the files of each unfinished run into pieces of at most `mib`; those that `folder` has are removed."""
    for earlier in folder.glob(PIECE.format(run="*", number="*", count="*")):
        earlier.unlink()
    limit = int(mib * MIB)
    for run, kept in enumerate(runs):
        whole = folder / f"unfinished-{run}.tar.gz"
        write_archive(whole, kept, results)
        count = -(-whole.stat().st_size // limit)
        with whole.open("rb") as content:
            for number in range(1, count + 1):
                (folder / PIECE.format(run=run, number=number, count=count)).write_bytes(content.read(limit))
        whole.unlink()


def find_unfinished(folder: Path) -> list[list[Path]]:
    """List the pieces of each unfinished run in a folder, in their order; ends the program where some are missing."""
    runs: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob(PIECE.format(run="*", number="*", count="*")):
        run, number, count = (int(digits) for digits in re.findall(r"\d+", path.name))
        runs.setdefault((run, count), {})[number] = path
    for (run, count), pieces in runs.items():
        if len(pieces) < count:
            sys.exit(
                f"{folder} has {len(pieces)} of the {count} files of unfinished-{run}: copy the others, or delete it"
            )
    return [[pieces[number] for number in sorted(pieces)] for _, pieces in sorted(runs.items())]


@contextlib.contextmanager
def open_pieces(pieces: list[Path]) -> Iterator[tarfile.TarFile]:
    """Open the archive that was cut into pieces."""
    with tempfile.TemporaryFile() as whole:
        for path in pieces:
            whole.write(path.read_bytes())
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole) as archive:
                yield archive
        except (tarfile.ReadError, gzip.BadGzipFile, zlib.error, EOFError):
            sys.exit(f"{pieces[0]} or one that follows it was not copied as a whole: copy them again")


if __name__ == "__main__":
    # As after Ctrl-C, the command that runs the queue is ended and what there is is packed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
