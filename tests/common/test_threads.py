"""How many threads: cores that are granted, whatever the machine has; small work on one."""

import math
import os
from pathlib import Path

import pytest
import torch

from structured_ensembles.common import threads
from structured_ensembles.common.threads import SMALL_WORK, choose_threads, count_usable_cores, use_threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend a machine of four cores with two hyperthreads each, all of which the process may use."""
    for number in range(8):
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    (tmp_path / "fs/cgroup/pod").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/pod\n")
    monkeypatch.setattr(threads, "SYSTEM", tmp_path)
    monkeypatch.setattr(threads, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_hyperthreads_of_a_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_usable_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4}, raising=False)
    assert count_usable_cores() == 2  # 0 and 4 are one core


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"pod/cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "300000 100000", "pod/cpu.max": "max 100000"}, 3),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_the_quota_of_a_container_limits_the_cores(machine: Path, files: dict[str, str], cores: int) -> None:
    for name, content in files.items():
        path = machine / "fs/cgroup" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content + "\n")
    assert count_usable_cores() == cores


def test_threads_follow_the_user_then_the_work_then_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads() == 4
    assert choose_threads(work=SMALL_WORK - 1) == 1
    assert choose_threads(work=SMALL_WORK) == 4
    assert choose_threads(wanted=7, work=0) == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert choose_threads(work=0) == 8


def test_slowness_is_explained_where_threads_wait_for_each_other(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    assert threads.explain_slowness(4) == ""
    assert threads.explain_slowness(5).startswith("5 threads are more than the 4 cores")
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    assert "busy (load 3.5 on 4 cores)" in threads.explain_slowness(4)
    assert threads.explain_slowness(1) == ""


def test_number_of_threads_is_restored_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with use_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == before
    assert math.isinf(threads.read_quota()) or threads.read_quota() > 0


def test_a_slow_number_of_threads_is_logged_once(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "_warned", False)
    threads.warn_of_slowness()  # eight threads, of which four have a core
    threads.warn_of_slowness()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "8 threads are more than the 4 cores that this process may use"
    ]
