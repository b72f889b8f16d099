"""No socket of ours listens beyond loopback: local clusters and process groups have no authentication."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from structured_ensembles.runs.grid import Job, run_grid
from structured_ensembles.runs.workers import Backend
from structured_ensembles.training import mesh
from tests.support.sockets import beyond_loopback, listening

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")


def test_socket_on_all_interfaces_is_detected() -> None:
    """Otherwise the tests below could not fail."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.1")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            found = listening(os.getpid())
            assert (address or "0.0.0.0") in found
            assert bool(beyond_loopback([address or "0.0.0.0"])) == (address != "127.0.0.1")


@pytest.mark.parametrize(("backend", "package"), [("loky", "joblib"), ("dask", "distributed"), ("ray", "ray")])
def test_local_grid_listens_on_loopback_only(backend: Backend, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    jobs = [Job(str(number), listening, {"root": os.getpid()}) for number in range(2)]
    outcomes = run_grid(jobs, backend, workers=2)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].result or backend == "loky"  # which uses pipes
    assert beyond_loopback(outcomes[0].result + outcomes[1].result) == []


def fake_ray(running: bool) -> tuple[SimpleNamespace, list[dict[str, object]]]:
    calls: list[dict[str, object]] = []

    def init(**options: object) -> None:
        calls.append(options)
        if options["address"] == "auto" and not running:
            raise ConnectionError("could not find any running Ray instance")

    def remote(**_: object) -> object:
        raise AssertionError("there are no jobs")

    return SimpleNamespace(
        init=init, is_initialized=lambda: False, shutdown=list, cluster_resources=dict, remote=remote
    ), calls


@pytest.mark.parametrize("address", [None, "local"])
def test_own_ray_cluster_is_bound_to_loopback(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent versions bind to the machine's outward address by default."""
    from structured_ensembles.runs.workers import ray

    package, calls = fake_ray(running=False)
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with ray(1, 1):
        last = calls[-1]
    assert (last["address"], last["_node_ip_address"], last["include_dashboard"]) == ("local", "127.0.0.1", False)
    assert [own["address"] for own in calls[:-1]] == ([] if address else ["auto"])


def test_running_ray_cluster_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.runs.workers import ray

    package, calls = fake_ray(running=True)
    monkeypatch.setitem(sys.modules, "ray", package)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with ray(1, 1):
        assert len(calls) == 1
    assert "_node_ip_address" not in calls[0]
    package, calls = fake_ray(running=False)
    monkeypatch.setitem(sys.modules, "ray", package)
    with pytest.raises(ConnectionError), ray(1, 1):
        pass
    assert len(calls) == 1  # no other cluster in its place


@pytest.mark.parametrize(("local", "chosen", "expected"), [("2", None, "lo"), ("1", None, None), ("2", "eth7", "eth7")])
def test_processes_of_one_host_use_loopback(
    local: str, chosen: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo would listen on an outward address if the host's name resolves to one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, value)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if chosen:
            monkeypatch.setenv(name, chosen)
    seen: list[list[str | None]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_: seen.append([os.environ.get(name) for name in names]))
    monkeypatch.setattr(dist, "destroy_process_group", list)
    with mesh.join_processes():
        seen.append([os.environ.get(name) for name in names])  # groups are made later too
    assert seen == [[expected, expected]] * 2
    assert [os.environ.get(name) for name in names] == [chosen, chosen]
