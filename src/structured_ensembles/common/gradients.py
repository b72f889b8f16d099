"""gradients_on(): compute gradients, whatever the caller has switched off."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients_on() -> Iterator[None]:
    """Compute gradients in a block, also where the caller has switched them off by `no_grad` or `inference_mode`."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
