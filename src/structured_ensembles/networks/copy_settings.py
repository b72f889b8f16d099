"""Turn off, in copies of a network, settings whose effect `torch.export` cannot follow: caches and LayerDrop.

Modules and configurations of transformers are recognised by the names of their attributes, so that the library need not
be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from structured_ensembles.common.logs import log_once

LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
NO_LAYER_DROP = "LayerDrop is off in copies of the network: a random choice of layers cannot be cut exactly"
logger = logging.getLogger(__name__)


def turn_off_cache_and_layer_drop(copied: nn.Module) -> None:
    """Turn caches and LayerDrop off in a copy of a network.

    A cache of keys and values serves the generation of text, not the logits of a batch; `torch.export` cannot return
    it. LayerDrop leaves out random layers in training (Whisper, wav2vec2): an exported graph has either all layers or
    not, so that channels could not be followed in training mode. That is logged, once.
    """
    for owner in _owners(copied):
        if getattr(owner, "use_cache", False) is True:
            owner.use_cache = False
        for name in LAYER_DROP:
            rate = getattr(owner, name, 0)
            if isinstance(rate, float) and rate > 0:
                setattr(owner, name, 0.0)
                log_once(logger, NO_LAYER_DROP)


def _owners(network: nn.Module) -> Iterator[Any]:
    """Yield all modules of a network, and their configurations, each once."""
    seen: set[int] = set()
    for module in network.modules():
        yield module
        config = vars(module).get("config")
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield config
