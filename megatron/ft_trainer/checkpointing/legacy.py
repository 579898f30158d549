"""Saves and loads Megatron-LM's format ``torch``: files of each tensor-, pipeline- and expert-parallel rank.

``mp_rank_TP[_PPP][_EEE]/model_optim_rng.pt`` has everything except the tensors of a distributed optimizer, which are in
``distrib_optim.pt`` beside it. Such a checkpoint loads into the same TP x PP x EP; the data-parallel size may change.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.ft_trainer.checkpointing import optimizer_state
from megatron.ft_trainer.checkpointing.naming import LEGACY, LEGACY_OPTIMIZER
from megatron.ft_trainer.checkpointing.plan import Plan, on_host
from megatron.ft_trainer.checkpointing.writer import OutputFile

FORMAT = "torch"
TENSORS = "parameter_state"
"""Key in a state dict to save for the content of ``distrib_optim.pt``."""


class LegacyPlanning:
    """Plans saves in this format. It has the methods of ``plan.SavePlanning``."""

    def plan(self, state_dict: dict, group: dist.ProcessGroup) -> Plan:
        """Return what this rank writes of ``state_dict``. Tensors of another device are copied to the host."""
        contents = dict(state_dict)
        tensors = contents.pop(TENSORS, None)
        written = {LEGACY: contents if _is_writer() else None, LEGACY_OPTIMIZER: tensors}
        files, size = [], 0
        for name, content in written.items():
            if content is not None:
                content = dict_list_map_outplace(on_host, content)
                found = [v for v in nested_values({name: content}) if isinstance(v, torch.Tensor)]
                size += sum(v.numel() * v.itemsize for v in found)
                files.append(OutputFile(f"{folder_name()}/{name}", [(None, content)]))
        return Plan(files, size, None)

    def forget(self) -> None:
        """Do nothing: no plan is kept."""


def folder_name() -> str:
    """Return the name of the folder of this rank's files."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def parameter_state(optimizer: Any) -> Any:
    """Return what Megatron-LM puts into ``distrib_optim.pt``; None if this rank does not write that file.

    Collective: each data-parallel group gathers its tensors on its first rank, over gloo.
    """
    states = [part.get_parameter_state_dp_zero() for part in _distributed(optimizer)]
    if not any(state is not None for state in states):
        return None
    return states[0] if len(optimizer_state.parts(optimizer)) == 1 else states


def read(checkpoint: Path, optimizer: Any) -> dict[str, Any]:
    """Return the state dict that this rank loads.

    Args:
        checkpoint: folder of the checkpoint.
        optimizer: core's optimizer if its distributed state is to be loaded, otherwise None.

    Raises:
        OSError: a file cannot be read.
        UnpicklingError: a file contains a type that megatron-core does not allow in checkpoints.
    """
    folder = checkpoint / folder_name()
    loaded = torch.load(folder / LEGACY, map_location="cpu", weights_only=True)
    if optimizer is not None and any(part.data_parallel_group.rank() == 0 for part in _distributed(optimizer)):
        states = torch.load(folder / LEGACY_OPTIMIZER, map_location="cpu", weights_only=True)
        loaded[TENSORS] = states if isinstance(states, list) else [states]
    return loaded


def _distributed(optimizer: Any) -> list[DistributedOptimizer]:
    return [part for part in optimizer_state.parts(optimizer) if isinstance(part, DistributedOptimizer)]


def _is_writer() -> bool:
    ranks = parallel_state.get_data_parallel_rank(True), parallel_state.get_expert_data_parallel_rank()
    return 0 in ranks
