"""Plans which parts of a sharded state dict this rank writes, with megatron-core's sharding and torch's save planner.

Core's own writer is not used. In 0.16.1 it forks processes for each file, waits for ever if one of them dies, needs
psutil without requiring it, spawns a manager process per rank that imports torch again, and reports the cause of a
failure only on rank 0; in 0.19 the writer is a different one. The planning and the format are core's.
"""

import io
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from megatron.ft_trainer.checkpointing.inventory import COMMON
from megatron.ft_trainer.checkpointing.writer import OutputFile

# Upper bound in bytes of what torch.save adds to a tensor's own bytes.
_OVERHEAD = 2048


@dataclass
class Plan:
    """The files that a rank writes.

    Args:
        files: this rank's files; rank 0 also has the part of the state that is equal on all ranks.
        bytes: estimated size of the files.
        metadata: on rank 0: the shapes and shards of the whole checkpoint, without the locations of the shards.
        error: why this rank could not plan, or None.
    """

    files: list[OutputFile]
    bytes: int
    metadata: Metadata | None
    error: str | None = None


class SavePlanning:
    """Plans saves.

    Args:
        spread_over: data-parallel group over which the writing of replicated tensors is spread; None: the first replica
            writes.
    """

    def __init__(self, spread_over: dist.ProcessGroup | None):
        self._spread_over = spread_over
        self.forget()

    def forget(self) -> None:
        """Discard all data kept from earlier saves. Call it on all ranks if one of them has made no save."""
        self._first, self._spread = True, None
        if self._spread_over is not None:
            self._spread = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), self._spread_over)

    def plan(self, state_dict: dict, group: dist.ProcessGroup) -> Plan:
        """Plan the save of ``state_dict``. All ranks of ``group`` have to call it.

        Tensors of another device are copied to the host; the plan for host tensors refers to the tensors themselves.
        """
        local, error = None, None
        try:
            sharded, common = save_preprocess(state_dict, validate_access_integrity=False)
            self._distribute(sharded)
            local = _local_plan(sharded)
        except Exception as failure:
            error = f"planning failed: {type(failure).__name__}: {failure}"
        if local is None:
            _agree_on_metadata(None, group)
            return Plan([], 0, None, error)
        planner, items = local
        try:
            metadata = _agree_on_metadata(planner, group)
        except Exception as failure:
            return Plan([], 0, None, f"planning failed: {type(failure).__name__}: {failure}")
        self._first = False
        parts = [(_index_to_json(i.index), on_host(planner.resolve_data(i))) for i in items]
        files = [OutputFile(f"__{dist.get_rank()}_0.distcp", parts)] if parts else []
        if dist.get_rank() == 0:
            files.append(OutputFile(COMMON, [(None, common)]))
        return Plan(files, sum(_size(data) + _OVERHEAD for _, data in parts), metadata)

    def _distribute(self, sharded: dict) -> None:
        """Decide which replica writes, and check once that exactly one rank writes every shard."""
        if self._spread is not None:
            self._spread.apply_saving_parallelization(sharded)
        elif self._first:
            validate_sharding_integrity(determine_global_metadata(sharded)[1])


def _agree_on_metadata(planner: MCoreSavePlanner | None, group: dist.ProcessGroup) -> Metadata | None:
    """Return on rank 0 the metadata of the whole checkpoint, combined from every rank's plan."""
    plans = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(planner.plan if planner else None, plans, dst=0, group=group)
    if plans is None or planner is None or None in plans:
        return None
    return planner.create_global_plan(plans)[1]


def index_from_json(index: list) -> MetadataIndex:
    """Decode the index that plans store with each part."""
    name, offset = index
    return MetadataIndex(name, offset)


def _index_to_json(index: MetadataIndex) -> list:
    return [index.fqn, None if index.offset is None else list(index.offset)]


def _local_plan(sharded: dict) -> tuple[MCoreSavePlanner, list]:
    """Return a planner that knows the shards of which this rank has the main replica, and its items."""
    shards: dict[str, list[ShardedBase]] = {}
    for shard in nested_values(sharded):
        if is_main_replica(shard.replica_id):
            key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
            shards.setdefault(key, []).append(shard)
    planner = MCoreSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(shards), is_coordinator=dist.get_rank() == 0)
    return planner, planner.create_local_plan().items


def on_host(data: Any) -> Any:
    """Return a tensor in host memory; anything else as it is."""
    return data.detach().cpu() if isinstance(data, torch.Tensor) else data


def _size(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return data.numel() * data.itemsize
    return data.getbuffer().nbytes if isinstance(data, io.BytesIO) else 0
