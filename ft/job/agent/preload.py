"""Chooses and imports the modules that the training script needs, in the warm pool, before workers are forked.

The warm pool is a process of ``ft run`` whose forked children are the workers (training processes). Imports of torch
and megatron take seconds; a forked worker need not repeat them.
"""

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator

from ft.job.agent import forking

NOTHING = "none"
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
        source: Python source code.
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
    if preload == [NOTHING]:
        return []
    with contextlib.suppress(Exception):  # if the script cannot be read or parsed, the worker that runs it reports that
        wanted = [*_read_imports(script, is_module), *preload]
        return list(dict.fromkeys([*_TORCH, *wanted, *_companions(wanted)]))
    return [*_TORCH, *preload]


def load(names: list[str], skip: set[str], withheld: set[str] = frozenset(), probes: bool = False) -> str:
    """Import ``names`` except those in ``skip``, and except modules that import a package in ``withheld``.

    If a module cannot be imported, the worker that imports it reports the error.

    Args:
        names: modules to import, in order.
        skip: modules that are not imported.
        withheld: packages that are not imported, whoever imports them.
        probes: whether to try after every import that a forked process can initialise CUDA.

    Returns:
        why forked processes cannot initialise CUDA even if nothing but torch is imported, or "".

    Raises:
        UnfitForForking: an import makes forking impossible. The packages that it names have to be withheld in a new
            process or, if it names none, the module has to be in ``skip``.
    """
    with warnings.catch_warnings(), forking.Withholding(withheld) as withholding, contextlib.ExitStack() as rest:
        warnings.simplefilter("ignore")
        broken = ""
        for name in _without(names, skip):
            if name.split(".")[0] == "megatron" and "megatron.patches" not in sys.modules:
                _attempt(_patch, withholding)
            _import(name, withholding, probes and not broken)
            if name == "torch" and hasattr(sys.modules.get(name), "cuda"):
                broken = forking.why_children_fail()
                rest.enter_context(forking.without_cuda())
        if "megatron.ft_trainer" in sys.modules:
            for name in _without(_modules_of("megatron.ft_trainer"), skip):
                _import(name, withholding, probes and not broken)
            _attempt(_rehearse, withholding)
    gc.collect()
    gc.freeze()
    return broken


def _import(name: str, withholding: forking.Withholding, probes: bool) -> None:
    before, refused = forking.packages(), withholding.refused
    _attempt(lambda: importlib.import_module(name), withholding)
    if withholding.refused > refused and name in sys.modules:
        raise forking.UnfitForForking(name, "works around a package that is withheld")
    forking.check(name, before, probes and name != "torch")


def _attempt(action: Callable[[], object], withholding: forking.Withholding) -> None:
    """Call ``action``, which imports modules.

    If it fails, workers will import the modules themselves: they fail alike, or can import what is withheld here.
    """
    before, refused = set(sys.modules), withholding.refused
    with contextlib.suppress(Exception, SystemExit, forking.Withheld):
        action()
    if withholding.refused > refused:
        forking.drop_orphans(before)


def _without(names: list[str] | Iterator[str], skip: set[str]) -> Iterator[str]:
    return (name for name in names if name not in skip)


def _read_imports(script: str, is_module: bool) -> list[str]:
    if not is_module:
        with open(script, encoding="utf-8") as file:
            return imports_of(file.read())
    spec = importlib.util.find_spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{script}.__main__")
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
