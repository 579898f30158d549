"""Fingerprint of a run of this trainer (:mod:`ft.protection.fingerprint`), from its options and its layout."""

from ft.protection import fingerprint as fingerprints
from megatron.ft_trainer.arguments import Layout, Options

_NOT_DECIDING = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),  # in the grid
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "distributed_backend", "local_rank"),
    *("distributed_timeout_minutes", "use_tp_pp_dp_mapping", "log_num_zeros_in_grad"),
)
"""Options of megatron-core that do not change the operators of a step, or that the layout contains."""


def fingerprint(options: Options, layout: Layout) -> dict[str, str | int]:
    """Return the fingerprint of a run: property -> value.

    Args:
        options: options of the run.
        layout: sizes of the parallel groups.
    """
    values, training = options.as_dict()["core"], options.training
    settings = {name: value for name, value in values.items() if name not in _NOT_DECIDING}
    return fingerprints.fingerprint(
        {**settings, "seq_length": options.data.seq_length},
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        dp=layout.dp,
        ep=layout.ep,
        micro_batch=training.micro_batch_size,
        global_batch=training.global_batch_size,
    )
