"""Rules for recurrent layers: LSTM, GRU and simple RNN."""

from __future__ import annotations

from collections.abc import Sequence

from structured_ensembles.tracing.layout import Layout, Value, fix, new_layout, unify
from structured_ensembles.tracing.rules import Call, Result, fix_unknown, rule


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> Result:
    """Unify the hidden units of all gates, layers and directions of a recurrent layer, whose number is one attribute.

    A hidden unit has a row for each gate, and is read by the recurrent weights, the next layer and whatever follows.
    """
    if "params" not in call.arguments:
        return fix_unknown(call, f"{call.name} without weights of its own")
    if "batch_sizes" in call.arguments:
        return _fix_layer(call, call["params"], f"{call.name} of packed sequences")
    inputs, weights = call["input"], call["params"]
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    directions = 2 if call["bidirectional"] else 1
    per_cell = 4 if call["has_biases"] else 2
    if len(weights) != per_cell * call["num_layers"] * directions:
        return _fix_layer(call, weights, f"{call.name} with projections")
    units = new_layout(states[0].shape[-1])
    for state in states:
        unify(state.dims[-1], units)
        fix(state.dims[0], "one state for each layer and direction")
    outputs = units if directions == 1 else units * 2
    gates = weights[0].shape[0] // states[0].shape[-1]
    rows = units * gates
    read: Layout = inputs.dims[-1]
    for layer in range(call["num_layers"]):
        for direction in range(directions):
            start = (layer * directions + direction) * per_cell
            input_weight, hidden_weight, *biases = weights[start : start + per_cell]
            unify(input_weight.dims[1], read)
            unify(hidden_weight.dims[1], units)
            for tensor in (input_weight, hidden_weight, *biases):
                unify(tensor.dims[0], rows)
            call.layers.consume(input_weight, read)
            call.layers.consume(hidden_weight, units)
        read = outputs
    call.layers.produce(weights[0], outputs)
    if len(inputs.shape) == 3:
        samples, tokens = (0, 1) if call["batch_first"] else (1, 0)
        for state in states:
            unify(state.dims[1], inputs.dims[samples])
    else:
        tokens = 0
    fix(inputs.dims[tokens], f"{call.name} runs over it")
    final = [Value(state.shape, (*state.dims[:-1], units)) for state in states]
    return [Value(call.shape, (*inputs.dims[:-1], outputs)), *final]


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(call: Call) -> Result:
    """Fix the hidden units of a cell, which the model's code feeds back step by step."""
    return _fix_layer(
        call, [call["w_ih"], call["w_hh"]], f"{call.name}: the code that calls it has a state of this size"
    )


def _fix_layer(call: Call, weights: Sequence[Value], reason: str) -> Result:
    """Fix what a recurrent layer touches, and report the layer, so that the table of groups shows it and the reason."""
    results = fix_unknown(call, reason)
    hidden_weight = weights[1]  # (gates * units, units that are fed back)
    call.layers.produce(hidden_weight, hidden_weight.dims[1], dim=1, bare=True)
    return results
