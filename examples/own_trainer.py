"""A training loop of one's own on plain megatron-core, protected by hot-swap in the lines marked "ft".

    ft run --nproc-per-node 4 --standby 1 --inject 'kill@step=5:rank=2' examples/own_trainer.py

Nothing of ``megatron/ft_trainer/`` is used. Data are a function of the number of the step, so a step can be redone.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import ft
from ft.base.errors import UserError
from megatron import patches

patches.apply()  # the CPU platform where there is no GPU; before megatron.core is imported

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

SEQUENCE, MICRO_BATCH, MICROBATCHES, VOCABULARY = 32, 2, 2, 256


def main() -> None:
    options = parse_arguments()
    session = attach()
    session.take_device(patches.platform().select_device)  # ft: a device that cannot be used costs no rank
    session.init_process_group(patches.platform().backend)  # ft: instead of torch.distributed's
    parallel_state.initialize_model_parallel(options.tp, options.pp)
    config, model = build_model(options)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0), [model])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    counter = ft.StepCounter()  # ft
    protected = ft.protect(session, [model], optimizer, None, counter)  # ft

    def work() -> None:
        while counter.step < options.steps:
            loss = train_step(model, optimizer, counter.step)
            counter.step += 1
            report(options, counter.step, loss)
            protected.committed()  # ft

    protected.run_with_recovery(work)  # ft
    session.close()  # ft


def attach():
    try:
        return ft.attach()  # ft: a standby waits here until it is needed
    except UserError as error:
        sys.exit(f"error: {error}")


def build_model(options: argparse.Namespace):
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).cuda(torch.cuda.current_device())
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return config, DistributedDataParallel(config, ddp, gpt)


def train_step(model, optimizer, step: int) -> float:
    """Train one step; return the mean loss on the last stage, and NaN on the stages before it."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(step),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    optimizer.step()
    if not losses:
        return float("nan")
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM, group=parallel_state.get_data_parallel_group())
    return mean.item() / parallel_state.get_data_parallel_world_size()


def batches(step: int):
    """The microbatches of a step for this data-parallel rank: runs of letters to be continued."""
    generator = torch.Generator(device="cpu").manual_seed(step * 1000 + parallel_state.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        start = torch.randint(0, VOCABULARY, (MICRO_BATCH, 1), generator=generator, device="cpu")
        text = (start + torch.arange(SEQUENCE + 1, device="cpu")) % VOCABULARY
        yield text.to(torch.cuda.current_device())


def forward_step(data, model):
    text = next(data)
    positions = torch.arange(SEQUENCE, device=text.device).expand(MICRO_BATCH, -1)
    return model(text[:, :-1], positions, None, labels=text[:, 1:].contiguous()), partial(mean_loss)


def mean_loss(losses):
    loss = losses.float().mean()
    return loss, loss.detach()


def report(options: argparse.Namespace, step: int, loss: float) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"step {step}: loss {loss:.6f}", flush=True)
        if options.losses:
            with Path(options.losses).open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--losses", help="file that gets one JSON line per step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
