"""A small GPT of megatron-core with all that a checkpoint holds, for the tests of checkpoints; and that it behaves."""

import hashlib
import random
from dataclasses import dataclass

from megatron.ft_trainer.arguments.topics import CheckpointOptions

STEPS_SEED = 1234
MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 90}


@dataclass(frozen=True)
class Shape:
    """Sizes of the parallel dimensions; the rest of the world is data-parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    experts: int | None = None
    distributed_optimizer: bool = True
    dropout: float = 0.1
    bf16: bool = False


class Run:
    """One rank of a training run, with a checkpointer. Made after the process group."""

    def __init__(self, shape: Shape, *, log=None, seed: int = STEPS_SEED, model=None, fingerprints=None, **options):
        from megatron import patches

        patches.apply()
        import numpy
        import torch
        import torch.distributed as dist

        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
        from megatron.ft_trainer.checkpointing.content import TrainState

        self.shape, self.seed, self.sizes = shape, seed, MODEL | (model or {})
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=shape.tp,
            pipeline_model_parallel_size=shape.pp,
            virtual_pipeline_model_parallel_size=shape.vpp,
            expert_model_parallel_size=shape.ep,
        )
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp = parallel_state.get_data_parallel_world_size()
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        self.config, self.chunks = _model(shape, self.sizes)
        self.optimizer, self.scheduler = _optimizer(shape, self.chunks)
        self.state = TrainState()
        self.messages: list[str] = []
        layout = {"world_size": dist.get_world_size(), "tp": shape.tp, "pp": shape.pp, "dp": self.dp, "ep": shape.ep}
        run_info = {"model": self.sizes, "options": {"model": self.sizes}, "fingerprints": fingerprints or {}}
        self.checkpointer = Checkpointer(
            CheckpointOptions(**options), layout=layout, run_info=run_info, log=log or self.messages.append
        )

    def train(self, steps: int) -> list[float]:
        """Trains and returns the losses, on the last stage; [] elsewhere."""
        losses = []
        for _ in range(steps):
            losses += self._step()
            self.state.step += 1
            self.state.consumed_train_samples += 4
        return losses

    def evaluate(self) -> list[float]:
        """The losses of four fixed samples, in their order, on the last stage; [] elsewhere."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.eval()
        out = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=self._data([(10_000, i) for i in range(4)]),
            model=self.chunks,
            num_microbatches=4,
            seq_length=16,
            micro_batch_size=1,
            forward_only=True,
        )
        for chunk in self.chunks:
            chunk.train()
        return [float(o["loss"]) for o in out]

    def save(self) -> bool:
        return self.checkpointer.save(self.state, self.chunks, self.optimizer, self.scheduler)

    def load(self):
        return self.checkpointer.load(self.state, self.chunks, self.optimizer, self.scheduler, self.seed)

    def digest(self) -> str:
        """A hash of all that must survive: weights, optimizer, schedule, generators, counters."""
        import torch

        from megatron.ft_trainer.checkpointing import rng

        hashed = hashlib.sha256()

        def add(value):
            if isinstance(value, torch.Tensor):
                hashed.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    hashed.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, list | tuple):
                for item in value:
                    add(item)
            else:
                hashed.update(repr(value).encode())

        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                add([name, parameter])
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            add(_inner_state(optimizer))
        add(self.scheduler.state_dict())
        add(rng.sharded(False).data)
        add(vars(self.state))
        return hashed.hexdigest()

    def close(self) -> None:
        from megatron.core import parallel_state

        self.checkpointer.close()
        parallel_state.destroy_model_parallel()

    def _step(self) -> list[float]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.finalize_model_grads_func = finalize_model_grads
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        count = 4 // self.dp
        samples = [(self.state.step, self.dp_rank * count + i) for i in range(count)]
        out = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=self._data(samples),
            model=self.chunks,
            num_microbatches=count,
            seq_length=16,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=4)
        return [float(o["loss"]) for o in out]

    def _data(self, samples):
        made = [iter([_sample(*s, self.sizes["vocab_size"]) for s in samples]) for _ in self.chunks]
        return made if len(made) > 1 else made[0]


def _sample(step: int, index: int, vocabulary: int):
    import torch

    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, vocabulary, (1, 17), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _forward(data, model):
    import torch

    tokens, labels = next(data)
    positions = torch.arange(16).unsqueeze(0)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=labels)

    def loss_of(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_of


def _model(shape: Shape, sizes: dict):
    import torch
    import torch.nn.functional as F

    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["ffn_hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        num_moe_experts=shape.experts,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp,
        expert_model_parallel_size=shape.ep,
        sequence_parallel=shape.tp > 1 and shape.experts is not None,
        pipeline_dtype=torch.bfloat16 if shape.bf16 else torch.float32,
        params_dtype=torch.bfloat16 if shape.bf16 else torch.float32,
        bf16=shape.bf16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        attention_softmax_in_fp32=True,
    )
    padded = -(-sizes["vocab_size"] // (16 * shape.tp)) * 16 * shape.tp
    chunks = []
    for stage in range(shape.vpp or 1):
        vp_stage = stage if shape.vpp else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=shape.vpp is None, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=shape.vpp is None, vp_stage=vp_stage)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(shape.experts, False),
            padded,
            16,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        for parameter in model.parameters():
            from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        wrapped = Float16Module(config, model) if shape.bf16 else model
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=shape.distributed_optimizer)
        chunks.append(DistributedDataParallel(config, ddp, wrapped))
    return config, chunks


def _optimizer(shape: Shape, chunks: list):
    import torch

    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            bf16=shape.bf16,
            params_dtype=torch.bfloat16 if shape.bf16 else torch.float32,
            use_distributed_optimizer=shape.distributed_optimizer,
            weight_decay=0.1,
            clip_grad=1.0,
        ),
        chunks,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=400,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _inner_state(optimizer) -> list:
    """Of one of core's optimizers: the state of torch's optimizer in the order of its parameters, and they."""
    inner = optimizer.optimizer
    found = []
    for group in inner.param_groups:
        found.append({k: v for k, v in group.items() if k != "params"})
        for parameter in group["params"]:
            found += [parameter, inner.state[parameter]]
    return found


def _train_twice(shape: Shape):
    run = Run(shape)
    run.train(2)
    first = run.digest()
    run.close()
    again = Run(shape)
    again.train(2)
    return first == again.digest()


def test_the_gpt_trains_the_same_twice(ranks):
    assert all(ranks(_train_twice, 2, Shape(tp=2)))
