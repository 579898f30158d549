"""A training loop on plain megatron-core, without `megatron.ft_trainer`: the reference for this project's trainer.

It uses nothing of this project but the CPU platform and the compilation of fused functions. The latter draws random
numbers, so both loops must do it alike.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist


@dataclass
class Setting:
    """The model and the parallel grid, in megatron-core's terms."""

    prefix: str
    steps: int = 4
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    seq_length: int = 32
    micro_batch: int = 2
    global_batch: int = 8
    vocab: int = 512
    lr: float = 1e-2
    num_layers: int = 4
    hidden_size: int = 32
    heads: int = 4
    config: dict = field(default_factory=dict)
    ddp: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)


def train(setting: Setting) -> dict:
    """Train; return losses, gradient norms and step times (s). Losses are NaN on all but the last stage."""
    trainer = PlainTrainer(setting)
    for _ in range(setting.steps):
        trainer.step()
    return {"losses": trainer.losses, "grad_norms": trainer.grad_norms, "times": trainer.times}


class PlainTrainer:
    """Trains step by step; ``losses``, ``grad_norms`` and ``times`` (s) have one entry for each step."""

    def __init__(self, setting: Setting):
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.ft_trainer.initialize import compile_fused_functions

        s = self.setting = setting
        self.losses, self.grad_norms, self.times = [], [], []
        parallel_state.initialize_model_parallel(
            s.tp, s.pp, s.vpp, expert_model_parallel_size=s.ep, expert_tensor_parallel_size=s.tp
        )
        seed = 1234 + 100 * parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.dp = parallel_state.get_data_parallel_world_size()
        self.half = bool(s.config.get("bf16"))
        self.dtype = torch.bfloat16 if self.half else torch.float32
        config = self._config()
        # This draws random numbers before the model is built, as this project's trainer and NVIDIA's do.
        compile_fused_functions(config, s.seq_length, s.micro_batch, gated=False)
        self.chunks = self._chunks(config)
        self.optimizer = self._optimizer()
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if s.ddp.get("overlap_grad_reduce"):
            no_sync, start = [c.no_sync for c in self.chunks], [c.start_grad_sync for c in self.chunks]
            config.no_sync_func = no_sync if s.vpp else no_sync[0]
            config.grad_sync_func = start if s.vpp else start[0]
        samples = s.steps * s.global_batch
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, s.lr, 0.0, 0, samples, "linear", 0.01, 0.01, samples, "constant"
        )
        self.run = get_forward_backward_func()
        dataset = self._dataset()
        self.iterators = [self._batches(dataset) for _ in self.chunks]
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _config(self):
        from megatron.core.transformer import TransformerConfig

        s = self.setting
        return TransformerConfig(
            num_layers=s.num_layers,
            hidden_size=s.hidden_size,
            num_attention_heads=s.heads,
            tensor_model_parallel_size=s.tp,
            pipeline_model_parallel_size=s.pp,
            virtual_pipeline_model_parallel_size=s.vpp,
            expert_model_parallel_size=s.ep,
            expert_tensor_parallel_size=s.tp,
            pipeline_dtype=self.dtype,
            params_dtype=self.dtype,
            deallocate_pipeline_outputs=True,
            attention_softmax_in_fp32=False,
            masked_softmax_fusion=False,
            bias_activation_fusion="num_moe_experts" not in s.config,
            bias_dropout_fusion=True,
            overlap_p2p_comm=s.vpp is not None,
            batch_p2p_comm=s.vpp is None,
            **s.config,
        )

    def _chunks(self, config) -> list:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
        from megatron.core.transformer.module import Float16Module

        s, chunks = self.setting, []
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=self.half, check_for_nan_in_grad=True, **s.ddp)
        for index in range(s.vpp or 1):
            stage = index if s.vpp else None
            spec = (
                get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=stage)
                if config.num_moe_experts
                else get_gpt_layer_local_spec(normalization=config.normalization)
            )
            chunk = GPTModel(
                config,
                spec,
                s.vocab,
                s.seq_length,
                pre_process=parallel_state.is_pipeline_first_stage(False, stage),
                post_process=parallel_state.is_pipeline_last_stage(False, stage),
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                vp_stage=stage,
            )
            for param in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
            chunks.append(Float16Module(config, chunk) if self.half else chunk)
        return [DistributedDataParallel(config, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]

    def _optimizer(self):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        s = self.setting
        config = OptimizerConfig(
            optimizer="adam",
            lr=s.lr,
            min_lr=0.0,
            weight_decay=0.01,
            bf16=self.half,
            params_dtype=self.dtype,
            clip_grad=1.0,
            use_distributed_optimizer=s.ddp.get("use_distributed_optimizer", False),
            overlap_param_gather=s.ddp.get("overlap_param_gather", False),
            **s.optimizer,
        )
        return get_megatron_optimizer(config, self.chunks)

    def _dataset(self):
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        class Tokenizer:
            vocab_size, eod, pad, unique_identifiers = 259, 256, 257, {}

        s = self.setting
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=s.seq_length,
            blend=([s.prefix], None),
            split="90,10,0",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        sizes = [s.steps * s.global_batch, s.global_batch, 0]
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]

    def _batches(self, dataset):
        """Yield microbatches in dataset order: sample i of a step is for data-parallel rank (i // micro batch) % DP."""
        from megatron.core import parallel_state

        s = self.setting
        position = parallel_state.get_data_parallel_rank() * s.micro_batch
        while True:
            samples = [dataset[i] for i in range(position, position + s.micro_batch)]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            position += s.micro_batch * self.dp

    def step(self) -> None:
        started = time.perf_counter()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reported = self.run(
            forward_step_func=forward_step,
            data_iterator=self.iterators if self.setting.vpp else self.iterators[0],
            model=self.chunks if self.setting.vpp else self.chunks[0],
            num_microbatches=self.setting.global_batch // self.setting.micro_batch // self.dp,
            seq_length=self.setting.seq_length,
            micro_batch_size=self.setting.micro_batch,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(self.setting.global_batch)
        loss = float("nan")
        if reported:
            total = torch.stack(reported).sum(dim=0)
            dist.all_reduce(total, group=self.group)
            loss = (total[0] / total[1]).item()
        self.losses.append(loss)
        self.grad_norms.append(float(grad_norm))
        self.times.append(time.perf_counter() - started)


def forward_step(iterator, chunk):
    batch = next(iterator)
    output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(mask, losses):
    mask = mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    return loss, mask.sum().to(torch.int), torch.stack([loss.detach(), mask.sum()])
