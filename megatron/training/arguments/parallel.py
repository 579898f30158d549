"""Flags: how the model and the data are spread over the ranks."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.training.arguments.schema import flag


@dataclass
class ParallelOptions:
    """parallelism"""

    tensor_model_parallel_size: int = 1
    """Ranks a layer is split over (TP)."""

    pipeline_model_parallel_size: int = 1
    """Stages the layers are split over (PP)."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers in a model chunk of the interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks per rank of the interleaved schedule."""

    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Consecutive microbatches a chunk runs before the next one has its turn. Default: PP."""

    decoder_first_pipeline_num_layers: int | None = None
    """Layers on the first stage; the others share the rest."""

    decoder_last_pipeline_num_layers: int | None = None
    """Layers on the last stage; the others share the rest."""

    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when splitting."""

    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer as a layer when splitting."""

    overlap_p2p_communication: bool = True
    """Overlap pipeline communication with compute (interleaved schedule)."""

    context_parallel_size: int = 1
    """Ranks a sequence is split over (CP; needs Transformer Engine)."""

    cp_comm_type: list[str] = flag(["p2p"], on="--cp-comm-type")
    """Communication of context parallelism, one for all layers or one per layer."""

    expert_model_parallel_size: int = 1
    """Ranks the experts are spread over (EP)."""

    expert_tensor_parallel_size: int | None = None
    """Ranks an expert is split over. Default: TP."""

    sequence_parallel: bool = False
    """Split norms and dropouts along the sequence over the TP ranks."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""

    num_distributed_optimizer_instances: int = 1
    """Groups of data-parallel ranks each holding a whole sharded optimizer state."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward runs."""

    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward runs."""

    align_grad_reduce: bool = True
    """Launch gradient reductions on all stages at the same time."""

    align_param_gather: bool = True
    """Launch parameter gathers on all stages at the same time."""

    ddp_bucket_size: int | None = None
    """Parameters in a gradient bucket."""

    ddp_num_buckets: int | None = None
    """Gradient buckets, instead of their size."""

    ddp_average_in_collective: bool = False
    """Average in the collective rather than before it."""

    use_tp_pp_dp_mapping: bool = False
    """Order the ranks TP, CP, EP, PP, DP instead of TP, CP, EP, DP, PP."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library. Default: nccl on GPUs, gloo on CPUs."""

    distributed_timeout_minutes: int = 10
    """How long a collective may take before the job is taken for broken."""

    create_gloo_process_groups: bool = flag(True, off="--disable-gloo-process-groups")
    """Make gloo groups beside the NCCL ones."""

    local_rank: int | None = flag(None, on=["--local-rank", "--local_rank"])
    """Local rank from old launchers; the environment's LOCAL_RANK counts."""

    def __post_init__(self):
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "num_distributed_optimizer_instances",
            "distributed_timeout_minutes",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "give at least 1")
        if self.num_layers_per_virtual_pipeline_stage and self.num_virtual_stages_per_pipeline_rank:
            raise UserError(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same thing",
                "give one of them",
            )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise UserError(
                "--overlap-param-gather needs sharded parameters and overlapped reductions",
                "add --use-distributed-optimizer --overlap-grad-reduce",
            )
        if self.num_distributed_optimizer_instances > 1 and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise UserError(
                f"--num-distributed-optimizer-instances {self.num_distributed_optimizer_instances} needs sharded "
                "optimizer state and overlapped reductions",
                "add --use-distributed-optimizer --overlap-grad-reduce",
            )
        if self.ddp_bucket_size and self.ddp_num_buckets:
            raise UserError("--ddp-bucket-size and --ddp-num-buckets say the same thing", "give one of them")
