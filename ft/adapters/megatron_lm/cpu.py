"""Runs a checkout's trainer on a machine without a GPU, in addition to the CPU support of ``megatron.patches``.

NVIDIA's trainer asserts that CUDA is available, compiles CUDA kernels and imports Triton. On a machine with a GPU this
module has no effect.
"""

import functools
import importlib.util
import inspect
import multiprocessing.spawn
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

from ft.adapters.megatron_lm import tree
from megatron.patches.replace import replace

_NEEDS_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.ops.paged_stash",
)
_HELPERS = "megatron.core.datasets.helpers_cpp"


def before_import() -> None:
    """Prepare the import of a checkout. Call it before any module of ``megatron.core`` is imported."""
    sys.meta_path.insert(0, _WithoutTriton())
    replace("torch.cuda", "is_available", lambda: False)  # by default it may count devices
    replace("torch.cuda", "device_count", lambda: 1)  # without a device the trainer makes no process groups
    replace("torch.cuda", "memory_stats", lambda device=None: dict.fromkeys(_MEMORY, 0))
    multiprocessing.spawn.get_preparation_data = _without_main(multiprocessing.spawn.get_preparation_data)
    _give_loaders_a_generator()


def after_import() -> None:
    """Adapt the modules of a checkout that require a GPU."""
    initialize, training = tree.module("initialize"), tree.module("training")
    for module in (tree.module("utils"), tree.module("arguments")):
        if hasattr(module, "get_device_arch_version"):
            replace(module.__name__, "get_device_arch_version", lambda: 8)
    start = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    replace(training.__name__, "initialize_megatron", start)
    if hasattr(initialize, "fused_kernels"):
        replace(initialize.fused_kernels.__name__, "load", lambda args: None)
    replace("megatron.core.datasets.utils", "compile_helpers", lambda: None)
    _load_helpers()


def _load_helpers() -> None:
    """Use the compiled index builder of the installed megatron-core if the checkout has none of its own."""
    if importlib.util.find_spec(_HELPERS) is not None:
        return
    for entry in sys.path:
        for file in Path(entry or ".").glob("megatron/core/datasets/helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location(_HELPERS, file)
            sys.modules[_HELPERS] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return


def _give_loaders_a_generator() -> None:
    """Let each data loader draw the seed of its workers from a generator of its own.

    By default it draws from the CPU's generator. That has no effect on training with a GPU, whose dropout has another
    generator. Here there is one for both, and only the first tensor-parallel rank has data loaders: the dropout masks
    of the others would differ from its own where they have to be equal.
    """
    import torch
    from torch.utils.data import DataLoader

    original = DataLoader.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        own = {} if given.get("generator") is not None else {"generator": torch.Generator()}
        original(self, *args, **kwargs, **own)

    DataLoader.__init__ = init


def _without_main(prepare):
    """Keep helper processes of checkpoints from running the training script as their main module."""

    @functools.wraps(prepare)
    def prepare_without_main(name):
        data = prepare(name)
        data.pop("init_main_from_path", None)
        data.pop("init_main_from_name", None)
        return data

    return prepare_without_main


_MEMORY = (
    "reserved_bytes.all.current",
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "allocation.all.current",
)


class _Absent:
    """Replacement for Triton: its attributes can be read and used as decorators, but no kernel can be launched."""

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent()

    def __call__(self, *args, **kwargs) -> "_Absent":
        return _Absent()

    def __getitem__(self, grid):
        raise RuntimeError("this kernel needs Triton and a GPU")


class _WithoutTriton(MetaPathFinder):
    """Import finder that provides a replacement for Triton while modules that require Triton are imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _NEEDS_TRITON or importlib.util.find_spec("triton") is not None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a module while ``triton`` is replaced by a module without kernels."""

    def __init__(self, inner: Loader):
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module) -> None:
        triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
        for each in (triton, language):
            each.__getattr__ = _Absent().__getattr__
        triton.language = language
        stand_ins = {"triton": triton, "triton.language": language}
        sys.modules.update(stand_ins)
        try:
            self._inner.exec_module(module)
        finally:
            for name in stand_ins:
                del sys.modules[name]
