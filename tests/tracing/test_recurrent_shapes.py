"""reading_one_token: recurrent layers have the same shapes on fake tensors, in a time that tokens do not add to."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from structured_ensembles.tracing.recurrent_shapes import OPERATIONS, reading_one_token


class Counter(TorchDispatchMode):
    """Count the operations that run."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def run_fake(kind: type[nn.RNNBase], tokens: int, features: int = 6, **options: Any) -> tuple[list[Any], int]:
    """Run a layer on fake tokens as an export does; return shapes, strides and dtypes, and how many operations ran."""
    with FakeTensorMode(), torch.no_grad(), enable_python_dispatcher():
        layer = kind(6, 5, dtype=torch.float64, **options)
        shape = (4, tokens, features) if layer.batch_first else (tokens, 4, features)
        with Counter() as counter:
            results = layer(torch.empty(shape, dtype=torch.float64))
    return [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in tree_leaves(results)], counter.operations


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"batch_first": True, "bidirectional": True, "num_layers": 2}]
)
def test_results_have_the_shapes_and_strides_of_all_tokens(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    expected, operations = run_fake(kind, 9, **options)
    with reading_one_token():
        results, fewer = run_fake(kind, 9, **options)
        _, same = run_fake(kind, 90, **options)
    assert results == expected
    assert results[0][0] == ((4, 9) if options else (9, 4)) + (10 if len(options) == 3 else 5,)
    assert fewer == same < operations


def test_kernels_and_results_of_real_tensors_are_as_before() -> None:
    before = [dict(operation.py_kernels) for operation in OPERATIONS]
    layer, tokens = nn.LSTM(6, 5), torch.randn(9, 4, 6)
    with torch.no_grad(), enable_python_dispatcher():
        expected = layer(tokens)[0]
        with reading_one_token(), reading_one_token():
            assert torch.equal(layer(tokens)[0], expected)
        assert torch.equal(layer(tokens)[0], expected)
    assert [operation.py_kernels for operation in OPERATIONS] == before


def test_wrong_sizes_fail_as_before() -> None:
    with reading_one_token(), pytest.raises(RuntimeError):
        run_fake(nn.LSTM, 9, features=7)
