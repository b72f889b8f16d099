"""SideStream: computes results that are needed later on a second stream, beside the work of the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_UNFINISHED = 2  # results that are computed at a time, whose arguments stay in memory


class SideStream:
    """Runs functions on a second stream; where there is none, on the current one.

    Arguments are kept until the current stream has waited for their result: if they were freed before, it could write
    to their memory while the second stream still reads it.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self._unfinished: deque[tuple[torch.cuda.Event, tuple[Any, ...]]] = deque()

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the function's result, which may be complete only after `join`."""
        if self.stream is None:
            return function(*arguments)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            result = function(*arguments)
            self._unfinished.append((self.stream.record_event(), arguments))
        self.join(MAX_UNFINISHED)
        return result

    def join(self, unfinished: int = 0) -> None:
        """Let the current stream wait until at most so many results are unfinished."""
        while len(self._unfinished) > unfinished:
            assert self.stream is not None
            done, _ = self._unfinished.popleft()
            torch.cuda.current_stream(self.stream.device).wait_event(done)
