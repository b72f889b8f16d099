"""pick_logits: which tensor of a network's outputs is used."""

import logging
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.common import outputs as outputs_module
from structured_ensembles.common.inputs import call
from structured_ensembles.common.logs import log_once
from structured_ensembles.common.outputs import pick_logits

LOGITS, OTHER = torch.rand(2, 3), torch.rand(2, 3)
Named = namedtuple("Named", ["aux", "logits"])


@pytest.mark.parametrize(
    "outputs",
    [
        LOGITS,
        {"logits": LOGITS, "hidden": OTHER},
        {"out": LOGITS, "aux": OTHER},
        {"anything": LOGITS, "cache": (OTHER, OTHER), "loss": None},
        (LOGITS,),
        [LOGITS],
        (LOGITS, (OTHER, OTHER)),
        Named(OTHER, LOGITS),
    ],
)
def test_logits_are_picked(outputs: Any) -> None:
    assert pick_logits(outputs) is LOGITS


@pytest.mark.parametrize("outputs", [(LOGITS, OTHER), {"a": LOGITS, "b": OTHER}, [], {"logits": None}, "text", None])
def test_outputs_that_do_not_tell_stay_as_they_are(outputs: Any) -> None:
    assert pick_logits(outputs) is outputs


def test_what_is_picked_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Dictionary(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x + 1, "features": x}

    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=outputs_module.logger.name):
        for _ in range(3):
            assert torch.equal(call(Dictionary(), LOGITS), LOGITS + 1)
    told = [record.getMessage() for record in caplog.records if record.name == outputs_module.logger.name]
    assert told == ["the network returns a dict: its 'logits' are used as the logits"]
