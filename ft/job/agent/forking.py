"""Keeps the warm pool fit for forking: its imports must neither start threads nor initialise CUDA.

A process whose parent has initialised CUDA cannot use it (``cuInit`` fails there). Some packages initialise CUDA when
they are imported: Transformer Engine asks for the compute capability of the GPU as soon as flash-attn is installed
(``get_device_compute_capability`` in its ``attention/dot_product_attention/backends.py``). Here NVML answers that
question, without CUDA. A package that initialises CUDA all the same is withheld: the pool starts again without it, and
imports no module that imports it, so that workers import these themselves.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ft.platform import devices, processes

_UVM = "/dev/nvidia-uvm"
"""Device file that the CUDA driver opens in ``cuInit`` and keeps open. NVML does not open it."""
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
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            torch.cuda.init()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace").strip()
    _, status = os.waitpid(child, 0)
    if said or status == 0:
        return said.partition("\n")[0]
    return f"it {processes.how_it_ended(os.waitstatus_to_exitcode(status))}"


# --- CUDA is not initialised by questions ----------------------------------------------------------------------------


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Return a context in which torch does not initialise CUDA in this process.

    Questions for the current device and for its compute capability are answered by NVML. Everything else that would
    initialise CUDA raises UnfitForForking, with the package that asked. Functions that a package has imported by name
    in this context work normally when it is over.
    """
    import torch

    cuda, is_active = torch.cuda, True
    pool = os.getpid()
    real = {name: getattr(cuda, name) for name in ("_lazy_init", "current_device", "get_device_properties")}
    found = [reading.capability for reading in devices.read()]

    def lazy_init() -> None:
        if is_active and not cuda.is_initialized() and os.getpid() == pool:
            package = _asking_package()
            raise UnfitForForking(package or "a module", "initialises CUDA", {package} - {""} - _OURS)
        real["_lazy_init"]()

    def current_device() -> int:
        return 0 if is_active and any(found) else real["current_device"]()

    def get_device_properties(device: Any = None) -> Any:
        index = cuda._utils._get_device_index(device, optional=True) if device is not None else current_device()
        if is_active and 0 <= index < len(found) and found[index] is not None:
            return _Properties(*found[index], lambda: real["get_device_properties"](device))
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


class _Properties:
    """The properties of a GPU as far as they are known without CUDA; the others are asked of CUDA.

    Args:
        major: major number of the compute capability.
        minor: minor number of the compute capability.
        real: function that returns the properties that CUDA reports.
    """

    warp_size = 32

    def __init__(self, major: int, minor: int, real: Callable[[], Any]):
        self.major, self.minor, self._real = major, minor, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


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
