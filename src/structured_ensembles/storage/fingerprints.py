"""Digests of what influences a run: tensors, modules, functions.

A value becomes JSON that is equal if and only if the value is: plain values as they are, tensors as a SHA-256 of their
bytes (2 GB/s, wherever they lie), functions as their name and code. What cannot be compared raises `UnidentifiedError`.
"""

from __future__ import annotations

import dis
import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, Sampler

from structured_ensembles.storage.tensor_file import bytes_of

CHUNK = 1024  # samples that are digested at a time
OURS = ("torch", "structured_ensembles")  # whose functions and classes are known by their names
PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, slice, bytes, complex)
MODULE_STATE = {*vars(nn.Module())}  # what every module has, and we describe otherwise, or not at all
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
DEEPEST = 24  # objects within objects that are looked at


class UnidentifiedError(TypeError):
    """A value of which nobody can tell whether another is the same; the message says what it is."""


def digest_of(value: Any) -> str:
    """Digest a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest names, types, shapes and contents."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(name.encode())
        add_tensor(found, tensor)
    return found.hexdigest()


def add_tensor(found: Any, tensor: Tensor, rows: Tensor | None = None) -> None:
    """Feed a tensor, or the `rows` of it, to a hash: its type, shape and bytes, through one small buffer."""
    if is_lazy(tensor):
        found.update(b"not initialised yet")
        return
    own = tensor.detach()
    own = own.to_dense() if own.layout != torch.strided else own
    count = len(own) if rows is None and own.dim() else 1 if rows is None else len(rows)
    found.update(f"{own.dtype} {(count, *own.shape[1:]) if own.dim() else ()}".encode())
    if rows is None:
        for piece in own.split(max(1, len(own) // 8)) if own.dim() and own.is_cuda else [own]:
            found.update(bytes_of(piece))
        return
    buffer = own.new_empty((min(CHUNK, count), *own.shape[1:]))
    for part in rows.to(own.device).split(CHUNK):
        found.update(bytes_of(torch.index_select(own, 0, part, out=buffer[: len(part)])))


# Modules ------------------------------------------------------------------------------------------------------------


def module_parts(module: nn.Module) -> dict[str, str]:
    """Digest a network: its weights, its buffers (also those that no file keeps), and its architecture.

    The architecture is the class of every layer, with the code of those that are not torch's or ours, and what it keeps
    as attributes, as far as it can be compared.
    """
    return {
        "weights": digest_of_tensors(module.named_parameters(remove_duplicate=False)),
        "buffers": digest_of_tensors(module.named_buffers(remove_duplicate=False)),
        "architecture": digest_of(list(_architecture(module))),
    }


def _architecture(module: nn.Module) -> Iterator[Any]:
    layers = list(module.named_modules())
    classes = {kind: _class(kind) for kind in {type(layer) for _, layer in layers}}
    for name, layer in layers:
        trained = [own for own, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]
        hooks = [list(vars(layer)[kind].values()) for kind in HOOKS]
        yield [name, classes[type(layer)], trained, described([hooks, _attributes(layer)], loose=True)]


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Return what a layer keeps besides its tensors and layers."""
    return {name: value for name, value in sorted(vars(layer).items()) if name not in MODULE_STATE}


# Values -------------------------------------------------------------------------------------------------------------


def described(value: Any, path: tuple[int, ...] = (), loose: bool = False) -> Any:
    """Describe a value, such as a loss, by JSON that is the same for the same value only.

    A function must have a name of its own in a module: no lambda, no function within another. Of an object, the class
    and all attributes count. path: the ids of what it is inside of.
    loose: raise nothing; of a lambda the code counts, of an object what can be compared of it.
    """
    if id(value) in path:
        return "itself"
    inside = (*path, id(value))
    for kind in (_datum(value), _composed(value, inside, loose)):
        if kind is not NotImplemented:
            return kind
    if isinstance(value, FunctionType):
        if "<" in value.__qualname__ and not loose:
            kind = "a lambda" if value.__name__ == "<lambda>" else "a function within another"
            raise UnidentifiedError(f"{kind}, {value.__qualname__}")
        return _function(value, inside, loose)
    if loose:
        return _object(value, inside)
    if isinstance(value, nn.Module):
        attributes = [_attributes(layer) for layer in value.modules()]
        return ["module", module_parts(value), described(attributes, inside)]
    if not hasattr(value, "__dict__") or _root(type(value)) in (*OURS, "builtins", "_thread"):
        raise UnidentifiedError(f"a {type(value).__module__}.{type(value).__qualname__}")
    return [_class(type(value)), described(dict(vars(value)), inside)]


def _object(value: Any, path: tuple[int, ...]) -> Any:
    """Describe an object as far as it can be compared: its class, and what it keeps unless Python or torch made it."""
    kind = type(value)
    known = _root(kind) in (*OURS, *sys.stdlib_module_names) and not isinstance(value, nn.Module | Dataset | Sampler)
    if known or len(path) > DEEPEST:
        return _name(kind)
    if isinstance(value, nn.Module):
        tensors = [digest_of_tensors(own) for own in (value.named_parameters(), value.named_buffers())]
        return [_class(kind), tensors, described(_attributes(value), path, loose=True)]
    slots = [slot for own in kind.__mro__ for slot in getattr(own, "__slots__", ()) if isinstance(slot, str)]
    kept = {**{slot: getattr(value, slot, None) for slot in slots}, **getattr(value, "__dict__", {})}
    return [_class(kind), described(kept, path, loose=True)]


def _datum(value: Any) -> Any:
    """Describe a single piece of data, or what has a name; NotImplemented for anything else."""
    match value:
        case Enum() | BuiltinFunctionType() | type() | ModuleType():
            return _name(value)
        case None | bool() | int() | str():
            return value
        case float():
            return ["float", repr(float(value))]
        case np.generic():
            return ["number", str(value.dtype), repr(value.item())]
        case Tensor():
            return ["tensor", digest_of_tensors([("", value)])]
        case np.ndarray() if value.dtype != object:
            contents = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return ["array", str(value.dtype), list(value.shape), contents]
        case _ if isinstance(value, PLAIN):
            return [_name(type(value)), repr(value)]
    return NotImplemented


def _composed(value: Any, path: tuple[int, ...], loose: bool) -> Any:
    """Describe what is made of data and functions; NotImplemented for any other object."""

    def each(*values: Any) -> list[Any]:
        return [described(own, path, loose) for own in values]

    match value:
        case list() | tuple():
            return [_name(type(value)), *each(*value)]
        case set() | frozenset():
            return ["set", *sorted(map(json.dumps, each(*value)))]
        case Mapping():
            return ["mapping", *each(*value.items())]
        case partial():
            return ["partial", *each(value.func, value.args, value.keywords)]
        case MethodType(__func__=FunctionType() as function):
            return ["method", *each(value.__self__), _function(function, path, loose)]
        case SimpleNamespace() | Namespace():
            return ["namespace", *each(vars(value))]
        case _ if is_dataclass(value):
            return [_class(type(value)), *each(*(getattr(value, own.name, None) for own in fields(value)))]
    return NotImplemented


# Code ---------------------------------------------------------------------------------------------------------------


def _function(function: FunctionType, path: tuple[int, ...], loose: bool) -> Any:
    """Describe a function: module and name, and where it is not torch's or ours, its code and what that refers to.

    The code is the bytecode with its constants and names, so that a comment changes nothing. Of what it finds in its
    module, data and functions of that module count too, anything else by its name.
    """
    name = _name(function)
    if _root(function) in OURS:
        return name
    used = []
    for own in sorted(_globals_of(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[own]
        elsewhere = isinstance(value, FunctionType) and value.__module__ != function.__module__
        used.append([own, _name(value) if elsewhere else described(value, path, loose=True)])
    around = [described(own, path, loose) for own in _contents(function) if not isinstance(own, type)]
    defaults = described([function.__defaults__, function.__kwdefaults__], path, loose=True)
    return [name, _code(function.__code__, function.__doc__), used, around, defaults]


def _contents(function: FunctionType) -> list[Any]:
    """List what a function, such as one made by a decorator, refers to of the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty yet
            found.append(cell.cell_contents)
    return found


def _code(code: CodeType, docstring: str | None = None) -> Any:
    constants = [own for own in code.co_consts if own is not None and own != docstring]
    parts = [_code(own) if isinstance(own, CodeType) else described(own, loose=True) for own in constants]
    return [hashlib.sha256(code.co_code).hexdigest(), list(code.co_names), parts]


def _globals_of(code: CodeType) -> set[str]:
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_globals_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def _class(kind: type) -> Any:
    """Describe a class: its name, its functions' code and its constants, up to the classes that are torch's or ours."""
    classes = [own for own in kind.__mro__ if _root(own) not in (*OURS, "builtins", "abc", "typing")]
    code = []
    for own in classes:
        for name, value in sorted(vars(own).items()):
            inner = getattr(value, "__func__", getattr(value, "fget", value))  # of a static method, of a property
            if isinstance(inner, FunctionType):
                code.append([name, _function(inner, (id(inner),), loose=True)])
            elif isinstance(value, int | float | str | tuple) and not name.startswith("__"):
                code.append([name, described(value, loose=True)])
    return [_name(kind), code]


def _name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', type(value).__qualname__)}"


def _root(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
