"""Collect the counters of batches, so that one kernel advances all of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from structured_ensembles.cuda.program import Program

ADD = torch.ops.aten.add_.Tensor


def collect_counters(program: Program) -> Program:
    """Take `buffer += 1` (the counters of batch norms) out of the graph and list the buffers in `counters`."""
    result = program.copy()
    counters = list(result.counters)
    for node in result.nodes:
        if node.op == "call_function" and node.target is ADD and not node.users and not node.kwargs:
            buffer, number = node.args
            if number == 1 and buffer.name in result.names and len(buffer.users) == 1:
                counters.append(result.names[buffer.name])
                result.graph.erase_node(node)
    return replace(result, counters=tuple(counters))
