"""Reads this process's rank from the launcher's environment variables, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.base.errors import UserError


@dataclass(frozen=True)
class Launch:
    """This process's rank, the world size and the rank on this node, as the launcher sets them."""

    rank: int
    world_size: int
    local_rank: int


def launch_from(environment: Mapping[str, str]) -> Launch:
    """Return the launch that torchrun, srun or mpirun describes in ``environment``; a world of one if none does.

    Raises:
        UserError: the environment is inconsistent: a rank without a world size, or a rank outside of it.
    """
    launchers = (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    )
    for rank_name, size_name, local_name in launchers:
        if rank_name in environment:
            try:
                rank, size = int(environment[rank_name]), int(environment[size_name])
                local = int(environment.get(local_name, rank))
            except (KeyError, ValueError) as error:
                raise UserError(
                    f"the launcher's environment is incomplete: {rank_name}={environment[rank_name]!r}, "
                    f"{size_name}={environment.get(size_name)!r}",
                    "start with torchrun, srun or mpirun",
                ) from error
            if environment.get("FT_STANDBY"):
                return Launch(rank, size, local)  # a standby, which holds no rank of the grid
            if not 0 <= rank < size:
                raise UserError(f"{rank_name}={rank} is outside of {size_name}={size}", "check the launcher")
            return Launch(rank, size, local)
    return Launch(0, 1, 0)
