"""check_copyable(): refuse a model whose copy would still run layers of the model."""

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def check_copyable(model: nn.Module) -> None:
    """Raise a ValueError if a model keeps a function or hook that refers to its layers, which a copy would run too."""
    targets = {id(target) for target in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            inside = ".".join(filter(None, ("model", name, "_orig_mod")))
            raise ValueError(
                f"model is wrapped by torch.compile, and a copy would run the model's layers: give the network inside, "
                f"{inside}, and compile afterwards. How members are computed, Execution(compile=…) says"
            )
        for attribute, value in vars(module).items():
            # A deep copy leaves out what `module.compile()` has compiled.
            if attribute not in ("_parameters", "_buffers", "_modules", "_compiled_call_impl") and any(
                _reaches(function, targets, set()) for function in _functions_in(value)
            ):
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"model keeps a function that refers to its own layers, {where}: in a copy it would run the "
                    "model's layers, not the copy's. Make it a method, or a module"
                )


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in containers, partial functions and methods, which a deep copy does not copy."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _functions_in(value.__func__)
    else:
        for item in _items(value):
            yield from _functions_in(item)


def _reaches(value: Any, targets: set[int], seen: set[int]) -> bool:
    """Tell whether a value refers to an object with one of the ids `targets`.

    A function refers to what its closure, its defaults and its global names hold. Containers, partial functions,
    methods and other functions are searched too.
    """
    if id(value) in targets:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        global_values = (value.__globals__.get(name) for name in value.__code__.co_names)
        modules = [item for item in global_values if isinstance(item, nn.Module | Tensor)]
        cells = [_content(cell) for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return any(_reaches(item, targets, seen) for item in (*cells, *defaults, *modules))
    items = [value.__self__, value.__func__] if isinstance(value, MethodType) else _items(value)
    return any(_reaches(item, targets, seen) for item in items)


def _items(value: Any) -> list[Any]:
    """List what a container or partial function holds; nothing for any other value."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _content(cell: CellType) -> object:
    """Return what a closure's cell holds; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
