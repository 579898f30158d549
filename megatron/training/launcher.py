"""What the environment says about the launch of this process; torch is not needed to read it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.base.errors import UserError


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int


def launch_from(environment: Mapping[str, str]) -> Launch:
    """The launch that torchrun, srun or mpirun describes in ``environment``; alone if none does.

    Raises:
        UserError: the environment is torn: a rank without a world size, or a rank outside of it.
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
                return Launch(rank, size, local)  # it has no logical rank yet
            if not 0 <= rank < size:
                raise UserError(f"{rank_name}={rank} is outside of {size_name}={size}", "check the launcher")
            return Launch(rank, size, local)
    return Launch(0, 1, 0)
