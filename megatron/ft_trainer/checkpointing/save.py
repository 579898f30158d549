"""Saves a sharded state dict: megatron-core's sharding and format, torch's writer, checksums, and an atomic commit.

Core's own writer is not used. In 0.16.1 it forks processes for each file, waits for ever if one of them dies, needs
psutil without requiring it, spawns a manager process per rank that imports torch again, and reports the cause of a
failure only on rank 0; in 0.19 the writer is a different one.
"""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.ft_trainer.agreement import from_rank_0, share
from megatron.ft_trainer.checkpointing import commit, inventory
from megatron.ft_trainer.checkpointing.commit import explain
from megatron.ft_trainer.checkpointing.inventory import FileRecord, Manifest, checksum

Files = dict[str, FileRecord]


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save, the same on all ranks.

    Args:
        step: step of the checkpoint.
        folder: folder of the checkpoints.
        error: why there is no new checkpoint, or None.
        bytes: size of all files.
        seconds: duration of the save.
        notes: errors that did not prevent the checkpoint.
    """

    step: int
    folder: Path
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


class _Writer(dcp.FileSystemWriter):
    """Torch's writer, which also writes what core has beside the shards, and computes checksums of this rank's files.

    An error of it is a RuntimeError that names the file and its cause: torch sends it to the other ranks.

    Attributes:
        records: name -> size and checksum of the files that this rank has written.
    """

    def __init__(self, folder: Path, common: dict):
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._folder, self._common, self.records = folder, common, {}

    def write_data(self, plan, planner):
        name = f"__{dist.get_rank()}_0.distcp"
        try:
            written = super().write_data(plan, planner)
            names = [name] if (self._folder / name).exists() else []
            if dist.get_rank() == 0:
                name = inventory.COMMON
                with open(self._folder / name, "wb") as stream:
                    torch.save(self._common, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                names.append(name)
            self.records |= {name: checksum(self._folder / name) for name in names}
        except Exception as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides what a stream raises
            raise RuntimeError(
                explain(cause, self._folder / name)
                if isinstance(cause, OSError)
                else f"{self._folder / name}: {type(error).__name__}: {error}"
            ) from error
        return written

    def finish(self, metadata, results):
        super().finish(metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        for name in (".metadata", "metadata.json"):
            with open(self._folder / name, "rb") as stream:
                os.fsync(stream.fileno())
            self.records[name] = checksum(self._folder / name)


def save(
    folder: Path,
    state_dict: dict,
    manifest: Manifest,
    group: dist.ProcessGroup,
    spread_over: dist.ProcessGroup,
    *,
    keep_last: int | None,
    distrusted: Collection[str],
) -> SaveOutcome:
    """Save a checkpoint. An error of any rank's disk is part of the outcome, and leaves older checkpoints as they were.

    All ranks have to call it.

    Args:
        folder: folder of the checkpoints.
        state_dict: the state to save.
        manifest: the manifest, except the serial number and the files.
        group: a gloo group of all ranks.
        spread_over: data-parallel group over which the writing of replicated tensors is spread.
        keep_last: number of complete checkpoints to keep; None: all.
        distrusted: names of checkpoints that failed verification.
    """
    started = time.monotonic()
    sharded, common = save_preprocess(state_dict, validate_access_integrity=False)
    if dist.get_world_size(spread_over) > 1:
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), spread_over)
        strategy.apply_saving_parallelization(sharded)
    # of which this rank has the main replica
    shards = [shard for shard in nested_values(sharded) if is_main_replica(shard.replica_id)]
    name, serial, error = from_rank_0(lambda: commit.prepare(folder, manifest.step), group)
    if error is not None:
        return SaveOutcome(manifest.step, folder, error)
    partial, by_key = folder / name, {}
    for shard in shards:
        by_key.setdefault(shard.unique_key if isinstance(shard, ShardedObject) else shard.key, []).append(shard)
    writer = _Writer(partial, common)
    try:
        planner = MCoreSavePlanner(flatten_state_dict=False)
        dcp.save(mcore_to_pyt_state_dict(by_key), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failure:  # the same on all ranks
        from_rank_0(lambda: commit.discard(partial), group)
        return SaveOutcome(manifest.step, folder, _first_error(failure))
    written = share(msgspec.to_builtins(writer.records), group)
    files = {name: record for records in msgspec.convert(written, list[Files]) for name, record in records.items()}
    manifest = msgspec.structs.replace(manifest, serial=serial, files=files)
    error, notes = from_rank_0(lambda: commit.commit(partial, manifest, keep_last, distrusted), group)
    size = sum(record.bytes for record in files.values())
    return SaveOutcome(manifest.step, folder, error, size, time.monotonic() - started, tuple(notes))


def _first_error(failure: CheckpointException) -> str:
    """Return the first failed rank's error, with the number of other failed ranks."""
    rank = min(failure.failures)
    others = len(failure.failures) - 1
    return f"rank {rank}: {failure.failures[rank][0]}" + (f" (and {others} more ranks failed)" if others else "")
