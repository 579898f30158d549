"""Imports in the warm pool, before workers are forked, the modules that the training script needs.

Imports of torch and megatron take seconds; a forked worker need not repeat them. But the imports must neither start
threads nor initialise CUDA: a process whose parent has initialised CUDA cannot use it (``cuInit`` fails there). Some
packages ask for properties of the GPU when they are imported, which initialises CUDA: Transformer Engine for its
compute capability as soon as flash-attn is installed, megatron-core from 0.20 on for its shared memory
(``ssm/ops/gdp/common.py``). In the pool a forked process asks the driver for them and ends. A package that initialises
CUDA all the same, or a module that starts threads, is withheld: the pool starts again without it, and imports no module
that imports it, so that workers import these themselves.
"""

import ast
import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from ft.base import bounded_json
from ft.platform import processes

_UVM = "/dev/nvidia-uvm"
"""Device file that the CUDA driver opens in ``cuInit`` and keeps open."""
_OURS = {"torch", "numpy", "megatron", "ft", "__main__", *sys.stdlib_module_names}
"""Packages that are never withheld."""


class UnfitForForking(BaseException):
    """An import has started threads or initialised CUDA, which forked processes could not use.

    It is no Exception, because packages catch those where they import others that may be missing.

    Attributes:
        roots: packages of which one has caused it; empty: unknown.
    """

    def __init__(self, module: str, what: str, roots: AbstractSet[str] = frozenset()) -> None:
        self.module, self.roots = module, set(roots)
        super().__init__(f"importing {module} {what}")


class Withheld(BaseException):
    """A module was imported that must not be imported in the warm pool. It is no Exception, for the same reason."""


def packages() -> set[str]:
    """Return the top-level packages that this process has imported."""
    return {name.partition(".")[0] for name in list(sys.modules)}


def check(name: str, before: set[str], probes: bool) -> None:
    """Check that this process can still be forked after an import.

    Args:
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
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == _UVM:
                return True
    return False


def why_children_fail() -> str:
    """Return why a forked process cannot initialise CUDA, "" if it can, or if there is no GPU."""
    torch: Any = sys.modules.get("torch")
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
            answer = [ask(), ""]
        except BaseException as caught:
            answer = [None, f"{type(caught).__name__}: {caught}".partition("\n")[0][:2000]]
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        value, error = bounded_json.loads(said)
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

    cuda: Any = torch.cuda
    is_active = True
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
        return int(real["current_device"]())

    def get_device_properties(device: Any = None) -> Any:
        if is_pool():
            return properties_of(0 if device is None else cuda._utils._get_device_index(device, optional=True))
        return real["get_device_properties"](device)

    stand_ins: dict[str, Callable[..., Any]] = {
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
    """Return name -> value of the attributes of ``torch.cuda``'s device properties that are numbers or text."""
    named = {name: getattr(properties, name) for name in dir(properties) if not name.startswith("_")}
    return {name: value for name, value in named.items() if isinstance(value, int | float | str)}


def _asking_package() -> str:
    """Return the package of the innermost caller outside of torch and this file."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package: str = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "ft", "importlib", "_frozen_importlib", "contextlib", ""):
            return package
        frame = frame.f_back
    return ""


# --- packages that are withheld --------------------------------------------------------------------------------------


class Withholding(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the import of modules and of all below them fail, in a context: they are found, and then raise Withheld."""

    def __init__(self, names: AbstractSet[str]):
        self._names, self.refused = names, 0

    def __enter__(self) -> "Withholding":
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{one}.") for one in self._names):
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


_NOTHING = "none"
_TORCH = ("torch", "torch.distributed")
_LOOP = (
    "torch._dynamo",  # every optimizer step imports it
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "encodings.idna",  # the first host name lookup imports it
)
_TRAINER = (
    "megatron.core.models.gpt",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.helpers",
)
_REPLICAS = ("ft.systems.hsdp.components", "ft.systems.hsdp.layer")
_FAULT_TOLERANCE = ("ft.worker.session", "ft.systems.hot_swap.layer", "ft.systems.checkfree.rebuilder")


def imports_of(source: str, package: str = "") -> list[str]:
    """Return the modules that a Python source may import, at any level of nesting, in order of appearance.

    ``from a import b`` gives ``a`` and ``a.b``: only importing would show whether ``b`` is a module.

    Args:
        package: the package that relative imports start from.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*filter(None, parents), *filter(None, [base])])
            found += [base] + [f"{base}.{alias.name}" for alias in node.names if alias.name != "*"]
    return [name for name in dict.fromkeys(found) if name]


def plan(script: str, is_module: bool, preload: list[str]) -> list[str]:
    """Return the modules to import, in order: torch, the imports of the script, and modules that go with these.

    Args:
        script: path of the script or, with ``is_module``, name of the module.
        is_module: whether the script is run like ``python -m``.
        preload: further modules to import; ["none"]: import nothing.
    """
    if preload == [_NOTHING]:
        return []
    with contextlib.suppress(Exception):  # if the script cannot be read or parsed, the worker that runs it reports that
        wanted = [*_read_imports(script, is_module), *preload]
        return list(dict.fromkeys([*_TORCH, *wanted, *_companions(wanted)]))
    return [*_TORCH, *preload]


def load(names: list[str], withheld: AbstractSet[str] = frozenset(), probes: bool = False) -> str:
    """Import ``names``, except what is in ``withheld`` and what imports that.

    If a module cannot be imported, the worker that imports it reports the error.

    Args:
        withheld: names of modules and packages that are not imported, whoever imports them.
        probes: whether to try after every import that a forked process can initialise CUDA.

    Returns:
        why forked processes cannot initialise CUDA even if nothing but torch is imported, or "".

    Raises:
        UnfitForForking: an import makes forking impossible. The packages that it names or, if it names none, its module
            have to be withheld in a new process.
    """
    with warnings.catch_warnings(), Withholding(withheld) as withholding, contextlib.ExitStack() as rest:
        warnings.simplefilter("ignore")
        broken = ""
        for name in names:
            if name.split(".")[0] == "megatron" and "megatron.patches" not in sys.modules:
                _attempt(_patch, withholding)
            _import(name, withholding, probes and not broken)
            if name == "torch" and hasattr(sys.modules.get(name), "cuda"):
                broken = why_children_fail()
                rest.enter_context(without_cuda())
        if "megatron.ft_trainer" in sys.modules:
            for name in _modules_of("megatron.ft_trainer"):
                _import(name, withholding, probes and not broken)
            _attempt(_rehearse, withholding)
    gc.collect()
    gc.freeze()
    return broken


def _import(name: str, withholding: Withholding, probes: bool) -> None:
    before, refused = packages(), withholding.refused
    _attempt(lambda: importlib.import_module(name), withholding)
    if withholding.refused > refused and name in sys.modules:
        raise UnfitForForking(name, "works around a package that is withheld")
    check(name, before, probes and name != "torch")


def _attempt(action: Callable[[], object], withholding: Withholding) -> None:
    """Call ``action``, which imports modules.

    If it fails, workers will import the modules themselves: they fail alike, or can import what is withheld here.
    """
    before, refused = set(sys.modules), withholding.refused
    with contextlib.suppress(Exception, SystemExit, Withheld):
        action()
    if withholding.refused > refused:
        drop_orphans(before)


def _read_imports(script: str, is_module: bool) -> list[str]:
    if not is_module:
        with open(script, encoding="utf-8") as file:
            return imports_of(file.read())
    spec = importlib.util.find_spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{script}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {script}")
    with open(spec.origin, encoding="utf-8") as file:
        return imports_of(file.read(), spec.parent or "")


def _companions(wanted: list[str]) -> list[str]:
    """Return modules that the wanted modules import only at run time, so that workers need them too."""
    tops = {name.split(".")[0] for name in wanted}
    trainer = any(name.startswith("megatron.ft_trainer") for name in wanted)
    protected = trainer or "ft" in tops
    loop = protected or any(name.startswith("megatron.core") for name in wanted)
    of_replicas = trainer and "FT_HSDP_REPLICA" in os.environ
    found = [*(_LOOP if loop else ()), *(_TRAINER if trainer else ()), *(_FAULT_TOLERANCE if protected else ())]
    return [*found, *(_REPLICAS if of_replicas else ())]


def _patch() -> None:
    """Apply this project's patches of megatron.core, which have to be in place before megatron.core is imported."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch.distributed")
        importlib.import_module("megatron.patches").apply()


def _rehearse() -> None:
    """Do the first work of every worker (parsing, patches) once here, so that forked workers need not repeat it.

    The start-up time of a replacement worker matters, because the other ranks wait for that worker.
    """
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module("megatron.ft_trainer.arguments").parse([])
    if "FT_HSDP_REPLICA" in os.environ:
        with contextlib.suppress(Exception):
            importlib.import_module("megatron.patches").apply("replicas")


def _modules_of(package: str) -> Iterator[str]:
    found = pkgutil.walk_packages(sys.modules[package].__path__, f"{package}.", onerror=lambda name: None)
    return (module.name for module in found if not module.name.endswith("__main__"))
