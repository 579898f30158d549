"""Keeps the warm pool fit for forking: its imports must neither start threads nor initialise CUDA.

A process whose parent has initialised CUDA cannot use it (``cuInit`` fails there). Some packages ask for properties of
the GPU when they are imported, which initialises CUDA: Transformer Engine for its compute capability as soon as
flash-attn is installed, megatron-core from 0.20 on for its shared memory (``ssm/ops/gdp/common.py``). In the pool a
forked process asks the driver for them and ends. A package that initialises CUDA all the same is withheld: the pool
starts again without it, and imports no module that imports it, so that workers import these themselves.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ft.platform import processes

_UVM = "/dev/nvidia-uvm"
"""Device file that the CUDA driver opens in ``cuInit`` and keeps open."""
_OURS = {"torch", "numpy", "megatron", "ft", "__main__", *sys.stdlib_module_names}
"""Packages that are never withheld."""


class UnfitForForking(BaseException):
    """An import has started threads or initialised CUDA, which forked processes could not use.

    It is no Exception, because packages catch those where they import others that may be missing.

    Args:
        module: name of the module that was imported.
        what: effect of the import, as a verb phrase for the message.
        roots: packages of which one has caused it; empty: unknown.
    """

    def __init__(self, module: str, what: str, roots: set[str] = frozenset()):
        self.module, self.what, self.roots = module, what, set(roots)
        super().__init__(f"importing {module} {what}")


class Withheld(BaseException):
    """A package was imported that must not be imported in the warm pool. It is no Exception, for the same reason."""


def packages() -> set[str]:
    """Return the top-level packages that this process has imported."""
    return {name.partition(".")[0] for name in list(sys.modules)}


def check(name: str, before: set[str], probes: bool) -> None:
    """Check that this process can still be forked after an import.

    Args:
        name: the module that was imported.
        before: the packages that were imported before.
        probes: whether to try CUDA in a forked process; otherwise this process is examined only.

    Raises:
        UnfitForForking: it cannot.
    """
    if (extra := processes.threads() - 1) > 0:
        raise UnfitForForking(name, f"starts {extra} thread(s)")
    if _has_cuda():
        raise UnfitForForking(name, "initialises CUDA", packages() - before - _OURS)
    if probes and (why := why_children_fail()):
        what = f"makes CUDA unusable in forked processes ({why})"
        raise UnfitForForking(name, what, packages() - before - _OURS)


def _has_cuda() -> bool:
    """Return whether CUDA is initialised in this process, by torch or by anything else."""
    torch = sys.modules.get("torch")
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == _UVM:
                return True
    return False


def why_children_fail() -> str:
    """Return why a forked process cannot initialise CUDA, "" if it can, or if there is no GPU."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return ""
    return _in_child(torch.cuda.init)[1]


def _in_child(ask: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function in a forked process.

    Args:
        ask: function that returns what JSON can represent.

    Returns:
        (what the function has returned, or None; the error that ended it or its process, "" if none did).
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = [ask(), ""]
        except BaseException as error:
            said = [None, f"{type(error).__name__}: {error}".partition("\n")[0][:2000]]
        with os.fdopen(write, "w") as pipe:
            json.dump(said, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        value, error = json.loads(said)
        return value, error
    return None, f"it {processes.how_it_ended(os.waitstatus_to_exitcode(status))}"


# --- CUDA is not initialised by questions ----------------------------------------------------------------------------


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Keep this process free of CUDA while it imports packages.

    A forked process finds the current device and the properties of a device. Where it cannot, because there is no GPU,
    the caller gets its error. Everything else that would initialise CUDA raises UnfitForForking, with the package that
    asked. Functions that a package has imported by name in this context work normally when it is over.
    """
    import torch

    cuda, is_active = torch.cuda, True
    pool = os.getpid()
    real = {name: getattr(cuda, name) for name in ("_lazy_init", "current_device", "get_device_properties")}

    def is_pool() -> bool:
        return is_active and os.getpid() == pool and not cuda.is_initialized()

    @functools.cache
    def found(index: int) -> tuple[Any, str]:
        return _in_child(lambda: _values(real["get_device_properties"](index)))

    def properties_of(index: int) -> SimpleNamespace:
        values, error = found(index)
        if error:
            raise RuntimeError(error)
        return SimpleNamespace(**values)

    def lazy_init() -> None:
        if is_pool():
            properties_of(0)
            package = _asking_package()
            raise UnfitForForking(package or "a module", "initialises CUDA", {package} - {""} - _OURS)
        real["_lazy_init"]()

    def current_device() -> int:
        if is_pool():
            properties_of(0)
            return 0
        return real["current_device"]()

    def get_device_properties(device: Any = None) -> Any:
        if is_pool():
            return properties_of(0 if device is None else cuda._utils._get_device_index(device, optional=True))
        return real["get_device_properties"](device)

    stand_ins: dict[str, Callable] = {
        "_lazy_init": lazy_init,
        "current_device": current_device,
        "get_device_properties": get_device_properties,
    }
    for name, function in stand_ins.items():
        setattr(cuda, name, function)
    try:
        yield
    finally:
        is_active = False
        for name, function in real.items():
            if getattr(cuda, name) is stand_ins[name]:  # unless a module has replaced it, as megatron.patches does
                setattr(cuda, name, function)


def _values(properties: Any) -> dict[str, Any]:
    """Return the properties of a device that are numbers or text, by name."""
    named = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def _asking_package() -> str:
    """Return the package of the innermost caller outside of torch and this file."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "ft", "importlib", "_frozen_importlib", "contextlib", ""):
            return package
        frame = frame.f_back
    return ""


# --- packages that are withheld --------------------------------------------------------------------------------------


class Withholding(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the import of packages fail, in a context. Such a package is found, but importing it raises Withheld.

    Args:
        roots: names of the packages.

    Attributes:
        refused: number of imports that have failed.
    """

    def __init__(self, roots: set[str]):
        self._roots, self.refused = roots, 0

    def __enter__(self) -> "Withholding":
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.refused += 1
        raise Withheld(module.__name__)


def drop_orphans(before: set[str]) -> None:
    """Remove the modules whose package was removed because its import has failed: the package is imported anew later.

    Args:
        before: names of the modules that were imported before that import; they are kept.
    """
    for name in sorted(set(sys.modules) - before):
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            sys.modules.pop(name, None)
