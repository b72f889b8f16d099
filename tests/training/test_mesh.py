"""Several processes: bit-identical members, equal subnets, saliency equal to rounding."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import structured_ensembles as se
from structured_ensembles.training.mesh import Mesh
from tests.support.fork_server import ForkServer
from tests.support.mesh_work import members, some_values, work
from tests.support.paths import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]  # at a port that is free
WORK = """
    import sys
    sys.path.insert(0, {root!r})
    import torch
    torch.set_num_threads(1)
    from tests.support.mesh_work import no_thread_is_left, work
    from structured_ensembles.training.mesh import join_processes
    with join_processes():
        work(sys.argv[1], *sys.argv[2:])
    assert no_thread_is_left()
"""
AGAIN = """
    import os, sys
    sys.path.insert(0, {root!r})
    import torch.distributed as dist
    import structured_ensembles as se
    from tests.support.mesh_work import members, no_thread_is_left, some_digits
    ranks = dict(rank=int(os.environ["RANK"]), world_size=2)
    for turn, count in enumerate((1, 1, 2, 2)):  # two processes share one member, or have one each
        # Each meets at a file of its own: the store of torchrun remembers old addresses.
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/" + str(turn), **ranks)
        se.train(se.Ensemble(members(count)), some_digits(), se.Recipe(epochs=1), "cpu", quiet=True)
        dist.destroy_process_group()
        assert no_thread_is_left()
"""


def write_script(folder: Path, code: str) -> Path:
    folder.mkdir(exist_ok=True)
    script = folder / "work.py"
    script.write_text(textwrap.dedent(code.format(root=str(ROOT))))
    return script


def run(processes: int, folder: Path, *arguments: str, code: str = WORK) -> subprocess.CompletedProcess[str]:
    """Run the code by `torchrun`, or in a new interpreter."""
    command = [sys.executable]
    if processes > 1:
        command += [*TORCHRUN, "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(write_script(folder, code)), str(folder), *arguments],
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def run_forked(server: ForkServer, processes: int, folder: Path, *arguments: str, code: str = WORK) -> None:
    """Run the code in processes with the environment and the store that `torchrun` gives them; all must end well."""
    script = write_script(folder, code)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a port that is free
    group = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    programs = [
        server.start(script, str(folder), *arguments, environment={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    for program in programs:
        assert program.wait() == 0, program.stderr.read_text()


def run_alone(folder: Path, what: str, count: str = "2") -> None:
    """Do the same in this process alone, as the reference."""
    folder.mkdir()
    work(str(folder), what, count)


@pytest.mark.parametrize(
    ("what", "processes", "count"), [("train", 2, 3), ("train", 4, 4), ("taught", 2, 2), ("tiny", 2, 1)]
)
def test_members_spread_over_processes_are_bit_identical(
    tmp_path: Path, programs: ForkServer, what: str, processes: int, count: int
) -> None:
    """So is a member whose tiny batches the first process takes: statistics of one without samples do not count."""
    run_alone(tmp_path / "one", what, str(count))
    run_forked(programs, processes, tmp_path / "many", what, str(count))
    expected = load_file(tmp_path / "one" / f"{what}-0.safetensors")
    for number in range(processes):
        tensors = load_file(tmp_path / "many" / f"{what}-{number}.safetensors")
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_more_processes_than_members_share_the_batches(tmp_path: Path, programs: ForkServer) -> None:
    run_alone(tmp_path / "one", "train")
    run_forked(programs, 4, tmp_path / "many", "train", "2")
    states = [load_file(tmp_path / "many" / f"train-{number}.safetensors") for number in range(4)]
    expected = load_file(tmp_path / "one" / "train-0.safetensors")
    for name, tensor in expected.items():
        assert all(torch.equal(state[name], states[0][name]) for state in states)
        assert states[0][name].shape == tensor.shape or name == "calibration"  # whose text may be longer
    # Normalisation and dropout see other samples, so that it is not the same network; but it has learned as much.
    for state in (expected, states[0]):
        ensemble = se.Ensemble(members(2)).eval()
        ensemble.load_state_dict(state)
        data = se.load_data("digits")
        ensemble.adopt(data)
        assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.6


def test_processes_agree_on_target_scaling(tmp_path: Path, programs: ForkServer) -> None:
    run_forked(programs, 2, tmp_path, "regression")
    states = [load_file(tmp_path / f"regression-{number}.safetensors") for number in range(2)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    ensemble = se.Ensemble([nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 1)) for _ in "ab"])
    ensemble.load_state_dict(states[0])
    inputs, targets = some_values().train.inputs, some_values().train.targets  # type: ignore[union-attr]
    errors = (ensemble.logits(inputs) - targets).square().mean((1, 2))  # of each member
    assert (errors < 0.3).all()


def test_processes_that_share_a_member_start_from_the_weights_of_the_first(
    tmp_path: Path, programs: ForkServer
) -> None:
    """Each process has drawn weights of its own; gradients of different networks would be added up."""
    run_alone(tmp_path / "one", "regression", "1")
    run_forked(programs, 2, tmp_path / "many", "regression", "1")
    expected = load_file(tmp_path / "one" / "regression-0.safetensors")
    tensors = load_file(tmp_path / "many" / "regression-0.safetensors")
    for name in ("members.0.0.weight", "members.0.3.weight"):
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("count", "size"), [(2, 65), (1, 33)])
def test_buffers_that_training_sets_in_one_process_reach_the_others(
    tmp_path: Path, programs: ForkServer, count: int, size: int
) -> None:
    """Each process trains a member of its own, or they share one and have 33 and 32 samples of a batch."""
    run_forked(programs, 2, tmp_path, "caching", str(count))
    first, second = (load_file(tmp_path / f"caching-{number}.safetensors") for number in range(2))
    assert all(first[f"{number}.cache"].tolist() == list(range(size)) for number in range(count))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_search_and_saliency_give_every_process_equal_subnets(tmp_path: Path, programs: ForkServer) -> None:
    whats = ("saliency", "search", "none")
    run_alone(tmp_path / "one", " ".join(whats))
    run_forked(programs, 2, tmp_path / "many", " ".join(whats))
    for what in whats:
        expected = load_file(tmp_path / "one" / f"{what}-0.safetensors")
        first, second = (load_file(tmp_path / "many" / f"{what}-{number}.safetensors") for number in range(2))
        assert all(torch.equal(first[name], second[name]) for name in expected)
        close = 1e-6 if what == "saliency" else 1e-3  # LeNet has no normalisation: only the order of sums differs
        for name, tensor in expected.items():
            if not name.startswith("kept."):
                torch.testing.assert_close(first[name], tensor, rtol=close, atol=close)


def test_dying_process_ends_the_others_and_the_run_resumes(tmp_path: Path, programs: ForkServer) -> None:
    failed = run(2, tmp_path / "many", "die", "2")
    assert failed.returncode != 0
    assert "the disk of process 1 is full" in failed.stderr
    assert (tmp_path / "many" / "checkpoint.safetensors").exists()
    run_forked(programs, 2, tmp_path / "many", "die", "2")
    run_alone(tmp_path / "one", "die")
    expected = load_file(tmp_path / "one" / "die-0.safetensors")
    tensors = load_file(tmp_path / "many" / "die-1.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_user_process_groups_end_without_threads_and_can_be_reopened(tmp_path: Path, programs: ForkServer) -> None:
    run_forked(programs, 2, tmp_path, code=AGAIN)


def test_import_inside_a_process_group_keeps_no_thread(tmp_path: Path) -> None:
    code = """
        import sys
        sys.path.insert(0, {root!r})
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/meeting", rank=0, world_size=1)
        from tests.support.mesh_work import no_thread_is_left, threads_of_groups
        assert threads_of_groups()
        dist.destroy_process_group()
        assert no_thread_is_left()
    """
    done = run(1, tmp_path, code=code)
    assert done.returncode == 0, done.stderr


def test_mesh_spreads_members_before_data() -> None:
    mesh = Mesh(member_rank=1, member_size=2, data_rank=0, data_size=2)
    assert [mesh.trains(number) for number in range(5)] == [False, True, False, True, False]
    assert [mesh.source(number) for number in range(4)] == [0, 2, 0, 2]


def test_sens_train_runs_under_torchrun(tmp_path: Path) -> None:
    options = (
        "train --dataset digits --model lenet5 --method structured --members 2 --epochs 1 --device cpu --quiet true"
    )
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "structured_ensembles", *options.split(), "--out", str(tmp_path / "run"),
         "--method_arguments", "{search_epochs: 1}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cls/accuracy") == 1  # one process speaks
    assert (tmp_path / "run" / "result.json").exists()
    assert len(se.Ensemble.load(tmp_path / "run" / "ensemble.safetensors")) == 2
