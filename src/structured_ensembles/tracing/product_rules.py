"""Rules for products of activations: matrix products, einsum, attention."""

from __future__ import annotations

from collections.abc import Sequence

from structured_ensembles.tracing.layout import (
    Layout,
    Relation,
    Value,
    fix,
    fixed_layout,
    mix,
    new_layout,
    product,
    unify,
)
from structured_ensembles.tracing.rules import Call, Result, broadcast, fix_unknown, rule


@rule("matmul", "mm", "bmm")
def matmul(call: Call) -> Result:
    """Unify the channels that a product sums over: a pair of them is kept or dropped, and the rest of the sum stays."""
    left, right = call["self"], call["other"] if "other" in call.arguments else call["mat2"]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return fix_unknown(call, "a product of vectors")
    _contract(call, left, right)
    batch = broadcast([left.dims[:-2], right.dims[:-2]], call.shape[:-2], Relation.SAME)
    return Value(call.shape, (*batch, left.dims[-2], right.dims[-1]))


@rule("addmm", "baddbmm")
def addmm(call: Call) -> Result:
    """Unify the channels that a product sums over, and those of what is added to it."""
    left, right = (call["mat1"], call["mat2"]) if call.name == "addmm" else (call["batch1"], call["batch2"])
    added = call["self"]
    _contract(call, left, right)
    batch = broadcast([left.dims[:-2], right.dims[:-2]], call.shape[:-2], Relation.SAME)
    dims = broadcast([(*batch, left.dims[-2], right.dims[-1]), added.dims], call.shape, Relation.SUM)
    return Value(call.shape, tuple(dims))


def _contract(call: Call, left: Value, right: Value) -> None:
    """Unify the last dimension of `left` with the last but one of `right`; report a layer whose weight is `right`."""
    parameter = left.parameter or right.parameter
    unify(left.dims[-1], right.dims[-2], Relation.SAME if parameter else Relation.GATE)
    if not parameter:
        call.layers.multiply(left.dims[-1])
    if left.parameter:
        call.layers.consume(left, right.dims[-2])
    if right.parameter:
        call.layers.consume(right, left.dims[-1])
        call.layers.produce(right, right.dims[-1], len(right.shape) - 1)


@rule("einsum")
def einsum(call: Call) -> Result:
    """Unify the dimensions that have the same letter; one that a single operand has, and is summed over, is mixed."""
    equation, operands = str(call["equation"]).replace(" ", ""), call["tensors"]
    terms, arrow, output = equation.partition("->")
    letters = terms.split(",")
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in letters):
        return fix_unknown(call, "an einsum with dots, repeated letters or no arrow")
    holders: dict[str, list[tuple[Value, Layout]]] = {letter: [] for term in letters for letter in term}
    for term, operand in zip(letters, operands, strict=True):
        for letter, dim, size in zip(term, operand.dims, operand.shape, strict=True):
            if size > 1:  # an operand of size 1 is broadcast
                holders[letter].append((operand, dim))
    for letter, held in holders.items():
        for _, dim in held[1:]:
            unify(held[0][1], dim, Relation.SAME if letter in output else Relation.GATE)
        if letter not in output:
            _sum_over(call, held)
    layouts = {letter: held[0][1] if held else fixed_layout(1) for letter, held in holders.items()}
    return Value(call.shape, tuple(layouts[letter] for letter in output))


def _sum_over(call: Call, held: Sequence[tuple[Value, Layout]]) -> None:
    """Report what an einsum sums over: channels that parameters read, products of activations, or one of them alone."""
    parameters = [operand for operand, _ in held if operand.parameter]
    for operand in parameters if len(held) > 1 else ():
        call.layers.consume(operand, held[0][1])
    if len(held) > 1 and not parameters:
        call.layers.multiply(held[0][1])
    if len(held) == 1:
        mix(held[0][1], "einsum runs over its channels")


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Result:
    """Unify heads, pairs of query and key features, and tokens. The scale stays that of the full head."""
    query, key, value = call["query"], call["key"], call["value"]
    features = query.dims[-1]
    unify(features, key.dims[-1], Relation.GATE)
    call.layers.multiply(features)
    unify(key.dims[-2], value.dims[-2])
    fix(key.dims[-2], "softmax runs over its channels")
    if call.arguments.get("enable_gqa"):
        repeats = query.shape[-3] // key.shape[-3]
        whole = product(key.dims[-3], new_layout(repeats) if repeats > 1 else fixed_layout(1))
        if whole is None:
            return fix_unknown(call, "attention with grouped heads of several pieces")
        unify(query.dims[-3], whole)
        unify(key.dims[-3], value.dims[-3])
        heads: list[Layout] = [*broadcast([v.dims[:-3] for v in (query, key, value)], call.shape[:-3], Relation.SAME)]
        heads.append(query.dims[-3])
    else:
        heads = broadcast([v.dims[:-2] for v in (query, key, value)], call.shape[:-2], Relation.SAME)
    if call.arguments.get("is_causal"):
        fix(query.dims[-2], "a causal mask counts its positions")
    mask = call.arguments.get("attn_mask")
    if mask is not None:
        broadcast([mask.dims, (*heads, query.dims[-2], key.dims[-2])], (*call.shape[:-1], key.shape[-2]), Relation.SAME)
    full, scale = query.shape[-1], call.arguments.get("scale")
    if scale is None:
        call.expected["scale"] = lambda size: None if size(features) == full else full**-0.5
        call.sizes["scale"] = full**-0.5
    return Value(call.shape, (*heads, query.dims[-2], value.dims[-1]))
