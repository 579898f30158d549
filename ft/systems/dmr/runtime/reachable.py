"""Find everything that a call can read or change, and put it back, for DMR (SpareTrain).

DMR verifies a call whose kernels bypass torch's dispatcher by executing the whole call twice. The second execution has
to begin with what the first one began with: in-place results, histories that each call moves, memory that a call frees,
flags and caches in Python objects.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from ft.base.errors import UserError

_PLAIN = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType, Enum, type)
_FOREIGN = ("torch", "builtins", "threading", "_thread", "logging", "ctypes", "numpy")
"""Packages into whose objects the search does not go; layers (torch.nn.Module) are searched all the same."""
_CLOSED = ("ft", "megatron.ft_trainer", "megatron.core.model_parallel_config")
"""Packages and modules into whose objects the search does not go, nor into those of subclasses: configurations refer to
functions of the trainer, from which the optimizer and DMR itself can be reached."""
_APART = ("main_param",)
"""Attributes of parameters that only the optimizer uses."""
_MOST = 20_000


class Reachable:
    """The tensors and the changeable objects that can be reached from some roots, and their contents so far.

    Args:
        roots: name -> where the search begins. A class stands for its attributes.
        known: what was reachable before; it is not listed again.

    Attributes:
        tensors: path from a root, such as "args[0].main_grad" -> tensor with memory. Tensors that consist of others
            (subclasses such as quantised ones) are listed by their parts.

    Raises:
        UserError: more objects can be reached than a call can work with.
    """

    def __init__(self, roots: Mapping[str, Any], known: "Reachable | None" = None):
        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, torch.Tensor] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {} if known is None else dict(known._seen)
        for name, root in roots.items():
            if isinstance(root, type):
                values = {key: value for key, value in vars(root).items() if not key.startswith("__")}
                self._contents.append((root, values))
                for key, value in values.items():
                    if not callable(value) and not isinstance(value, classmethod | staticmethod | property):
                        self._visit(f"{name}.{key}", value)
            else:
                self._visit(name, root)

    def note_flags(self, owner: type) -> None:
        """Have the attributes of a class, and of objects of its package that they hold, put back as well.

        The search does not go on from them: only what the attributes refer to is noted.
        """
        values = {key: value for key, value in vars(owner).items() if not key.startswith("__")}
        self._contents.append((owner, values))
        for value in values.values():
            if not callable(value) and _package(type(value)) == _package(owner):
                self._contents.append((value, _attributes(value)))

    def contents(self, path: str) -> torch.Tensor:
        """Return a tensor by its path; an empty one if its memory was freed."""
        tensor = self.tensors[path].detach()
        return tensor if tensor.untyped_storage().nbytes() >= _end(tensor) else tensor.new_empty(0)

    def copies(self, paths: Collection[str]) -> dict[str, torch.Tensor]:
        """Return copies of the contents of some tensors, by path."""
        return {path: self.contents(path).clone() for path in paths if path in self.tensors}

    def put_back(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Restore all objects, the memory of all tensors, and the contents of those of which there are ``copies``."""
        for container, contents in self._contents:
            _restore(container, contents)
        for path, memory in self._memory.items():
            tensor = self.tensors[path]
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape:
                tensor.data = memory
            storage, end = memory.untyped_storage(), _end(memory)
            if storage.nbytes() < end:
                storage.resize_(end)
        for path, copy in copies.items():
            # ``data`` has a version counter of its own: autograd does not take this for a change
            self._memory[path].copy_(copy)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            raise UserError(
                f"DMR cannot put back what a call changes: over {_MOST:,} objects can be reached from its arguments",
                "leave the function out with --ft-dmr-unstable",
            )
        if isinstance(value, torch.Tensor):
            self._visit_tensor(path, value)
        else:
            for name, inner in self._inner(value):
                self._visit(path + name, inner)

    def _inner(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield (end of the path, object) for what ``value`` holds, and note the contents of what can be changed."""
        if isinstance(value, list | tuple | deque):
            contents = list(value)
            if not isinstance(value, tuple):
                self._contents.append((value, contents))
            yield from ((f"[{number}]", each) for number, each in enumerate(contents))
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
        elif isinstance(value, set):
            self._contents.append((value, set(value)))
        elif isinstance(value, weakref.ref):
            yield "", value()
        elif isinstance(value, functools.partial):
            yield from (("", value.func), ("", value.args), ("", value.keywords))
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
            yield "", value.__func__
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType())
            yield from ((f".__defaults__[{number}]", each) for number, each in enumerate(value.__defaults__ or ()))
        elif isinstance(value, torch.nn.Module) or not (_package(type(value)) in _FOREIGN or _is_closed(type(value))):
            contents = _attributes(value)
            self._contents.append((value, contents))
            # hooks belong to the model and to other systems, from which all of it can be reached
            yield from ((f".{name}", each) for name, each in contents.items() if "hook" not in name)

    def _visit_tensor(self, path: str, tensor: torch.Tensor) -> None:
        attributes = _attributes(tensor)
        self._contents.append((tensor, attributes))
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            for name, each in attributes.items():
                self._visit(f"{path}.{name}", each)
            return
        if tensor.layout is torch.strided and not tensor.is_meta:
            self.tensors[path] = tensor
            self._memory[path] = tensor.data
        for name, each in attributes.items():
            if isinstance(each, torch.Tensor) and name not in _APART:
                self._visit(f"{path}.{name}", each)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@functools.cache
def _is_closed(kind: type) -> bool:
    return any(f"{each.__module__}.".startswith(f"{name}.") for each in kind.__mro__ for name in _CLOSED)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: those in its dict and those in slots."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _restore(container: Any, contents: Any) -> None:
    """Make the contents of a container or the attributes of an object those that were noted."""
    if isinstance(container, list | deque):
        if len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
            container.clear()
            container.extend(contents)
    elif isinstance(container, set | dict):
        if not _is_same(container, contents):
            container.clear()
            container.update(contents)
    else:
        present = dict(vars(container)) if isinstance(container, type) else _attributes(container)
        # the functions of ``object``, because classes such as frozen dataclasses refuse changes by their own
        change = setattr if isinstance(container, type) else object.__setattr__
        for name, value in contents.items():
            if present.get(name) is not value or name not in present:
                change(container, name, value)
        for name in present.keys() - contents.keys():
            if not isinstance(container, type):
                object.__delattr__(container, name)


def _is_same(container: Any, contents: Any) -> bool:
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return container == contents
    return all(name in container and container[name] is value for name, value in contents.items())


def _end(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the beginning of its storage to the end of a tensor."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()
