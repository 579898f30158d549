"""Lets torch, megatron-core and Transformer Engine read checkpoints without executing code that these contain.

A pickle can call any function that it names. torch unpickles the file ``.metadata`` of a sharded checkpoint, and the
objects beside its tensors, without restriction. So do the layers of Transformer Engine with the bytes of their states
(``_extra_state``). Here they get an unpickler that knows a list of names, or ``torch.load`` with ``weights_only``.
"""

import contextlib
import io
import pickle
import signal
import threading
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from megatron.patches.manifest import Patch

_DCP, _SHARDS = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
_CORE, _RECIPE = "megatron.core.dist_checkpointing.strategies.torch", "transformer_engine.common.recipe"
_NAMES = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
        *((f"{_DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        *((f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.filesystem", "_StorageInfo")),
        *((_SHARDS, "TensorProperties"), (_SHARDS, "MEM_FORMAT_ENCODING")),  # torch 2.2 and older
        # core keeps the plans of all ranks in the metadata
        *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
        *((f"{_DCP}.planner", name) for name in ("TensorWriteData", "BytesIOWriteData")),
        *((_CORE, "MCoreMetadata"), (_CORE, "MCoreSavePlan")),
        *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
        *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("builtins", "set"), ("builtins", "frozenset")),
        # states of Transformer Engine
        *((_RECIPE, name) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")),
        *((_RECIPE, name) for name in ("MXFP8BlockScaling", "NVFP4BlockScaling", "Format", "_FormatHelper")),
        *((_RECIPE, name) for name in ("MMParams", "QParams")),
        ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
        ("torch._utils", "_rebuild_tensor_v2"),
    }
)
"""(module, name) of what a pickle in a checkpoint may name, besides the dtypes of torch. None of these calls what it is
given. A function that does, such as ``torch._tensor._rebuild_from_type_v2``, must not be added.
"""

_STORAGES = ("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")
"""(module, name) of what a pickle outside of torch's own format names for a tensor's memory; core replaces torch's."""


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the names in ``_NAMES`` and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _STORAGES:
            return _storage
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _NAMES and not is_dtype:
            problem = f"it names {module}.{name}, which no checkpoint needs, and which could be harmful"
            raise pickle.UnpicklingError(problem)
        return super().find_class(module, name)


def read_metadata(stream: Any) -> Any:
    """Return the content of a file ``.metadata``.

    Args:
        stream: the file, opened for reading bytes.

    Raises:
        pickle.UnpicklingError: it names something that no checkpoint needs, or is no pickle.
    """
    return _Restricted(stream).load()


@contextlib.contextmanager
def in_layers() -> Iterator[None]:
    """In this context, what the layers of a model unpickle in this thread may not name what no checkpoint needs.

    ``pickle.loads`` itself is replaced, because the modules of Transformer Engine that call it differ between releases.
    """
    unrestricted, thread = pickle.loads, threading.get_ident()

    def loads(data: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return unrestricted(data, **options)
        return _Restricted(io.BytesIO(data), **options).load()

    pickle.loads = loads
    try:
        yield
    finally:
        pickle.loads = unrestricted


def reason(error: BaseException) -> str:
    """Return what an error of reading a pickle complains of, in one line, without torch's advice to lift the limits."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "GLOBAL" in line or line.startswith("WeightsUnpickler")), lines[0])


def apply() -> None:
    """Have ``torch.load`` accept what checkpoints of Megatron-LM contain.

    Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles a member of an enumeration as a call of ``getattr``, and a
    signal by its name in the module ``signal``, neither of which ``torch.load`` accepts by default. Megatron-LM stores
    such members in the ``args`` of its checkpoints, and cannot load them there itself. ``getattr`` is accepted of
    enumerations and of nothing else. Core stores classes of torch's optimizers in the parameter groups of
    --optimizer-cpu-offload.
    """
    signals = [(each, f"signal.{each.name}") for each in signal.Signals]
    offloaded = [torch.optim.AdamW, torch.optim.SGD]
    torch.serialization.add_safe_globals([(_member, "builtins.getattr"), *signals, *offloaded])


def _load_bytes(_, self, read_item, value):
    name = read_item.dest_index.fqn
    loaded = torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _storage(data: bytes) -> Any:
    """Return a tensor's storage; torch's own function for this, which a pickled tensor names, is not restricted."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"getattr of {kind!r} in a checkpoint, which is allowed of enumerations only")
    return kind[name]


PATCHES = (
    Patch(
        "torch.distributed.checkpoint.filesystem",
        "pickle",
        "torch unpickles the file .metadata of a sharded checkpoint without restriction: it could execute code",
        new=SimpleNamespace(**{**vars(pickle), "load": read_metadata}),
    ),
    Patch(
        "torch.distributed.checkpoint.default_planner",
        "DefaultLoadPlanner.load_bytes",
        "torch unpickles the objects in a sharded checkpoint without restriction",
        _load_bytes,
        ("(self, read_item, value)",),
    ),
)
