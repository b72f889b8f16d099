"""Fingerprints of what influences a run: tensors, modules, functions.

A value is described by JSON that is equal if and only if the value is: plain values as they are, tensors by the SHA-256
of their bytes (2 GB/s, on any device), functions by their name and code. A value that cannot be compared raises an
`UnidentifiedError`.
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

from structured_ensembles.networks.hooks import FORWARD_HOOKS
from structured_ensembles.storage.tensor_file import bytes_of

CHUNK = 1024  # rows that are hashed at a time
KNOWN_PACKAGES = ("torch", "structured_ensembles")  # their functions and classes count by their names
PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, slice, bytes, complex)
MODULE_STATE = {*vars(nn.Module())}  # attributes of every module, which are described elsewhere or not at all
MAX_DEPTH = 24  # of objects within objects that are described


class UnidentifiedError(TypeError):
    """Raised for a value that cannot be compared with others, such as a lambda; the message says what it is."""


def digest_json(value: Any) -> str:
    """Compute the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Compute the SHA-256 of the names, dtypes, shapes and contents of tensors."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(name.encode())
        add_tensor(digest, tensor)
    return digest.hexdigest()


def add_tensor(digest: Any, tensor: Tensor, rows: Tensor | None = None) -> None:
    """Update a hash with the dtype, shape and bytes of a tensor, or of its `rows`, chunk by chunk."""
    if is_lazy(tensor):
        digest.update(b"not initialised yet")
        return
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    count = len(dense) if rows is None and dense.dim() else 1 if rows is None else len(rows)
    digest.update(f"{dense.dtype} {(count, *dense.shape[1:]) if dense.dim() else ()}".encode())
    if rows is None:
        for chunk in dense.split(max(1, len(dense) // 8)) if dense.dim() and dense.is_cuda else [dense]:
            digest.update(bytes_of(chunk))
        return
    buffer = dense.new_empty((min(CHUNK, count), *dense.shape[1:]))
    for indices in rows.to(dense.device).split(CHUNK):
        digest.update(bytes_of(torch.index_select(dense, 0, indices, out=buffer[: len(indices)])))


# Modules ------------------------------------------------------------------------------------------------------------


def digest_module(module: nn.Module) -> dict[str, str]:
    """Compute digests of a network: of its weights, its buffers (non-persistent ones too), and its architecture.

    The architecture is the class of every layer, with its code where that is not torch's or ours, and its attributes,
    as far as they can be compared.
    """
    return {
        "weights": digest_tensors(module.named_parameters(remove_duplicate=False)),
        "buffers": digest_tensors(module.named_buffers(remove_duplicate=False)),
        "architecture": digest_json(list(_architecture(module))),
    }


def _architecture(module: nn.Module) -> Iterator[Any]:
    """Describe every layer: its name, class, trained parameters, hooks and attributes."""
    layers = list(module.named_modules())
    classes = {layer_type: _describe_class(layer_type) for layer_type in {type(layer) for _, layer in layers}}
    for name, layer in layers:
        trained = [key for key, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]
        hooks = [list(vars(layer)[attribute].values()) for attribute in FORWARD_HOOKS]
        yield [name, classes[type(layer)], trained, describe([hooks, _attributes(layer)], loose=True)]


def _attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer other than its tensors, layers and hooks."""
    return {name: value for name, value in sorted(vars(layer).items()) if name not in MODULE_STATE}


# Values -------------------------------------------------------------------------------------------------------------


def describe(value: Any, path: tuple[int, ...] = (), loose: bool = False) -> Any:
    """Describe a value, such as a loss, by JSON that is equal only for equal values.

    A function must be defined at the top level of a module: lambdas and nested functions raise an UnidentifiedError. An
    object is described by its class and all its attributes.
    path: the ids of the objects that contain the value.
    loose: raise nothing; describe a lambda by its code, and an object as far as it can be compared.
    """
    if id(value) in path:
        return "itself"
    inside = (*path, id(value))
    description = _describe_datum(value)
    if description is NotImplemented:
        description = _describe_container(value, inside, loose)
    if description is not NotImplemented:
        return description
    if isinstance(value, FunctionType):
        if "<" in value.__qualname__ and not loose:
            name = "a lambda" if value.__name__ == "<lambda>" else "a function within another"
            raise UnidentifiedError(f"{name}, {value.__qualname__}")
        return _describe_function(value, inside, loose)
    if loose:
        return _describe_object(value, inside)
    if isinstance(value, nn.Module):
        attributes = [_attributes(layer) for layer in value.modules()]
        return ["module", digest_module(value), describe(attributes, inside)]
    if not hasattr(value, "__dict__") or _package(type(value)) in (*KNOWN_PACKAGES, "builtins", "_thread"):
        raise UnidentifiedError(f"a {type(value).__module__}.{type(value).__qualname__}")
    return [_describe_class(type(value)), describe(dict(vars(value)), inside)]


def _describe_object(value: Any, path: tuple[int, ...]) -> Any:
    """Describe an object as far as it can be compared: its class, and its attributes unless Python or torch made it."""
    cls = type(value)
    packages = (*KNOWN_PACKAGES, *sys.stdlib_module_names)
    known = _package(cls) in packages and not isinstance(value, nn.Module | Dataset | Sampler)
    if known or len(path) > MAX_DEPTH:
        return _name(cls)
    if isinstance(value, nn.Module):
        digests = [digest_tensors(tensors) for tensors in (value.named_parameters(), value.named_buffers())]
        return [_describe_class(cls), digests, describe(_attributes(value), path, loose=True)]
    slots = [slot for base in cls.__mro__ for slot in getattr(base, "__slots__", ()) if isinstance(slot, str)]
    attributes = {**{slot: getattr(value, slot, None) for slot in slots}, **getattr(value, "__dict__", {})}
    return [_describe_class(cls), describe(attributes, path, loose=True)]


def _describe_datum(value: Any) -> Any:
    """Describe a number, string, tensor or array, or something by its name; NotImplemented for anything else."""
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
            return ["tensor", digest_tensors([("", value)])]
        case np.ndarray() if value.dtype != object:
            contents = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return ["array", str(value.dtype), list(value.shape), contents]
        case _ if isinstance(value, PLAIN):
            return [_name(type(value)), repr(value)]
    return NotImplemented


def _describe_container(value: Any, path: tuple[int, ...], loose: bool) -> Any:
    """Describe a container, partial function, method or dataclass; NotImplemented for any other object."""

    def describe_all(*values: Any) -> list[Any]:
        return [describe(item, path, loose) for item in values]

    match value:
        case list() | tuple():
            return [_name(type(value)), *describe_all(*value)]
        case set() | frozenset():
            return ["set", *sorted(map(json.dumps, describe_all(*value)))]
        case Mapping():
            return ["mapping", *describe_all(*value.items())]
        case partial():
            return ["partial", *describe_all(value.func, value.args, value.keywords)]
        case MethodType(__func__=FunctionType() as function):
            return ["method", *describe_all(value.__self__), _describe_function(function, path, loose)]
        case SimpleNamespace() | Namespace():
            return ["namespace", *describe_all(vars(value))]
        case _ if is_dataclass(value):
            values = (getattr(value, field.name, None) for field in fields(value))
            return [_describe_class(type(value)), *describe_all(*values)]
    return NotImplemented


# Code ---------------------------------------------------------------------------------------------------------------


def _describe_function(function: FunctionType, path: tuple[int, ...], loose: bool) -> Any:
    """Describe a function: module and name, and if it is not torch's or ours, its code and what that refers to.

    The code is the bytecode with its constants and names, so that a comment changes nothing. Of the globals that it
    uses, data and functions of the same module are described too, anything else by its name.
    """
    name = _name(function)
    if _package(function) in KNOWN_PACKAGES:
        return name
    global_values = []
    for global_name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[global_name]
        elsewhere = isinstance(value, FunctionType) and value.__module__ != function.__module__
        global_values.append([global_name, _name(value) if elsewhere else describe(value, path, loose=True)])
    closure = [describe(value, path, loose) for value in _closure_values(function) if not isinstance(value, type)]
    defaults = describe([function.__defaults__, function.__kwdefaults__], path, loose=True)
    return [name, _describe_code(function.__code__, function.__doc__), global_values, closure, defaults]


def _closure_values(function: FunctionType) -> list[Any]:
    """List the values in a function's closure, such as the function that a decorator wraps."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return values


def _describe_code(code: CodeType, docstring: str | None = None) -> Any:
    """Describe bytecode with its names and constants, without its docstring."""
    constants = [constant for constant in code.co_consts if constant is not None and constant != docstring]
    descriptions = [
        _describe_code(constant) if isinstance(constant, CodeType) else describe(constant, loose=True)
        for constant in constants
    ]
    return [hashlib.sha256(code.co_code).hexdigest(), list(code.co_names), descriptions]


def _global_names(code: CodeType) -> set[str]:
    """Collect the global names that code loads, nested functions included."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {str(instruction.argval) for instruction in dis.get_instructions(code) if instruction.opname in loads}
    return names.union(*(_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def _describe_class(cls: type) -> Any:
    """Describe a class: its name, its functions' code and its constants, up to the classes that are torch's or ours."""
    ignored = (*KNOWN_PACKAGES, "builtins", "abc", "typing")
    code = []
    for base in [base for base in cls.__mro__ if _package(base) not in ignored]:
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))  # of a static method, of a property
            if isinstance(function, FunctionType):
                code.append([name, _describe_function(function, (id(function),), loose=True)])
            elif isinstance(value, int | float | str | tuple) and not name.startswith("__"):
                code.append([name, describe(value, loose=True)])
    return [_name(cls), code]


def _name(value: Any) -> str:
    """Return the qualified name of a module, enum member, class or function, or of an object's class."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', type(value).__qualname__)}"


def _package(value: Any) -> str:
    """Return the top-level package that a class or function is defined in."""
    return str(getattr(value, "__module__", "")).partition(".")[0]
