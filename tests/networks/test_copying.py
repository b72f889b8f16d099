"""evaluation_mode(): every submodule gets its own mode back, and a network in evaluation mode is left alone."""

import threading

import pytest
from torch import nn

from structured_ensembles.networks.modes import evaluation_mode, list_modules


def test_modes_of_submodules_are_restored() -> None:
    shared = nn.Dropout()
    network = nn.Sequential(nn.Linear(2, 2), nn.Sequential(shared, nn.BatchNorm1d(2)), shared)
    network[1][1].eval()
    modes = [module.training for module in network.modules()]
    with evaluation_mode(network):
        assert not any(module.training for module in network.modules())
    assert [module.training for module in network.modules()] == modes
    assert sorted(map(id, list_modules(network))) == sorted(map(id, network.modules()))


def test_a_network_in_evaluation_mode_is_not_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching all modules takes as long as the prediction of a small network."""
    network, calls = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), []
    monkeypatch.setattr(nn.Module, "train", lambda module, mode=True: calls.append(module))
    with evaluation_mode(network):
        pass
    assert calls == []


def test_nested_tensors_are_off_in_encoders_within_members() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    network = nn.Sequential(nn.ModuleDict({"a": nn.TransformerEncoder(layer, 1)}))
    encoder = network[0]["a"]
    assert encoder.use_nested_tensor
    with evaluation_mode(network):
        assert not encoder.use_nested_tensor
    assert encoder.use_nested_tensor


def test_threads_that_predict_with_one_network_stay_in_evaluation_mode() -> None:
    """The first that was done once switched back to training mode, in which the others changed batch norm."""
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    inside, go_on = threading.Event(), threading.Event()

    def predict() -> None:
        with evaluation_mode(network):
            inside.set()
            go_on.wait(10)

    other = threading.Thread(target=predict)
    with evaluation_mode(network):
        other.start()
        assert inside.wait(10)
    assert not any(module.training for module in network.modules())
    go_on.set()
    other.join()
    assert all(module.training for module in network.modules())
