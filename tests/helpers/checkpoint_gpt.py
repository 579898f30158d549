"""A small GPT of the reference trainer with all that a checkpoint holds, for the tests of checkpoints."""

import hashlib
from dataclasses import dataclass

from megatron.ft_trainer.arguments.topics import CheckpointOptions

MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 90}
FLAGS = (
    "--reference-trainer --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 100 --lr 1e-2 "
    "--min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --mock-data --use-cpu-initialization "
)


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
    offloaded: bool = False

    def flags(self, sizes: dict) -> str:
        shape = {
            **{name: size for name, size in sizes.items() if name != "vocab_size"},
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "num_virtual_stages_per_pipeline_rank": self.vpp,
            "num_experts": self.experts,
            "attention_dropout": self.dropout,
            "hidden_dropout": self.dropout,
        }
        switches = {
            "bf16": self.bf16,
            "use_precision_aware_optimizer": self.offloaded,
            "optimizer_cpu_offload": self.offloaded,
            "use_distributed_optimizer": self.distributed_optimizer,
            "sequence_parallel": self.tp > 1 and self.experts is not None,
        }
        words = [f"--{name.replace('_', '-')} {value}" for name, value in shape.items() if value is not None]
        return FLAGS + " ".join([*words, *(f"--{name.replace('_', '-')}" for name, on in switches.items() if on)])


class Run:
    """One rank of a training run, with a checkpointer. Made after the process group."""

    def __init__(self, shape: Shape, *, log=None, seed: int = 1234, model=None, fingerprints=None, **options):
        from megatron import patches

        patches.apply()
        import torch.distributed as dist

        from megatron.ft_trainer import arguments, initialize
        from megatron.ft_trainer import model as models
        from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
        from megatron.ft_trainer.checkpointing.content import TrainState

        self.shape, self.sizes = shape, MODEL | (model or {})
        given = arguments.parse(f"{shape.flags(self.sizes)} --seed {seed}")
        layout = arguments.check(given, dist.get_world_size(), has_te=False)
        initialize.init_model_parallel(given.core, layout)
        self.reseed = lambda step=0: initialize.seed_everything(given, step)
        self.reseed()
        padded = -(-self.sizes["vocab_size"] // (16 * shape.tp)) * 16 * shape.tp
        trainee = models.build(given, layout, padded)
        self.chunks, self.optimizer, self.scheduler = trainee.chunks, trainee.optimizer, trainee.scheduler
        self.dp, self.state, self.messages = layout.dp, TrainState(), []
        run_info = {"model": self.sizes, "options": {"model": self.sizes}, "fingerprints": fingerprints or {}}
        self.checkpointer = Checkpointer(
            CheckpointOptions(**options), layout=vars(layout), run_info=run_info, log=log or self.messages.append
        )

    def train(self, steps: int) -> list[float]:
        """Trains and returns the losses, on the last stage; [] elsewhere."""
        from megatron.core import parallel_state

        losses, first = [], parallel_state.get_data_parallel_rank() * (4 // self.dp)
        for _ in range(steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses += self._pass([(self.state.step, first + i) for i in range(4 // self.dp)], forward_only=False)
            self.optimizer.step()
            self.scheduler.step(increment=4)
            self.state.step += 1
            self.state.consumed_train_samples += 4
        return losses

    def evaluate(self) -> list[float]:
        """The losses of four fixed samples, in their order, on the last stage; [] elsewhere."""
        for chunk in self.chunks:
            chunk.eval()
        losses = self._pass([(10_000, i) for i in range(4)], forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return losses

    def save(self) -> bool:
        return self.checkpointer.save(self.state, self.chunks, self.optimizer, self.scheduler)

    def load(self):
        return self.checkpointer.load(self.state, self.chunks, self.optimizer, self.scheduler, self.reseed)

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
            add(dict(chunk.named_parameters()))
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            add(_inner_state(optimizer))
        add(self.scheduler.state_dict())
        add(rng.sharded().data)
        add(vars(self.state))
        return hashed.hexdigest()

    def close(self) -> None:
        from megatron.core import parallel_state

        self.checkpointer.close()
        parallel_state.destroy_model_parallel()

    def _pass(self, samples: list[tuple[int, int]], *, forward_only: bool) -> list[float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.ft_trainer.loop import make_forward_step

        data = [iter([_sample(*s, self.sizes["vocab_size"]) for s in samples]) for _ in self.chunks]
        interleaved = len(self.chunks) > 1
        reported = get_forward_backward_func()(
            forward_step_func=make_forward_step(True),
            data_iterator=data if interleaved else data[0],
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=len(samples),
            seq_length=16,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [float(total / tokens) for total, tokens in reported]


def _sample(step: int, index: int, vocabulary: int) -> dict:
    import torch

    tokens = torch.randint(0, vocabulary, (1, 17), generator=torch.Generator().manual_seed(1000 * step + index))
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, 16),
        "position_ids": torch.arange(16).unsqueeze(0),
    }


def _inner_state(optimizer) -> list:
    """Of one of core's optimizers: the state of torch's optimizer in the order of its parameters, and they."""
    inner = optimizer.optimizer
    found = []
    for group in inner.param_groups:
        found.append({k: v for k, v in group.items() if k != "params"})
        for parameter in group["params"]:
            held = inner.state[parameter]
            found += [parameter, {key: value for key, value in held.items() if not isinstance(value, bool)}]
    return found
