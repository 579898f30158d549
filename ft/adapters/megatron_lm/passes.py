"""Forward and backward passes of a step that several worlds compute together: each computes a part of the samples.

The checkout's ``train_step`` gets its function for the passes as an argument, ``forward_backward_func``. The functions
here are passed to it instead. Everything else in a step, such as the sample counters and the learning-rate schedule,
counts the global batch, as if one world computed it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.state import Run
from ft.base.errors import UserError
from megatron.core import parallel_state
from megatron.patches import step_state

Losses = list[dict[str, torch.Tensor]]
"""For each microbatch, name -> [loss sum, number of tokens]; empty on all pipeline stages but the last."""


@dataclass(frozen=True)
class Received:
    """What the exchange of gradients has given to a world that computed none, until the optimizer's step uses it.

    Attributes:
        losses: the losses of the other worlds.
        gradients: (live tensor, copy in host memory) of all gradients. The trainer clears its gradients when it begins
            the step in which they are used.
    """

    losses: Losses
    gradients: list[tuple[torch.Tensor, torch.Tensor]]

    def hand_over(self, **_: Any) -> Losses:
        """Restore the gradients and return the losses, in place of forward and backward passes."""
        for live, copy in self.gradients:
            live.copy_(copy)
        return self.losses


def compute_part(run: Run, original: Callable[..., Losses], **given: Any) -> Losses:
    """Run the passes of this world's part of the step, and return the losses of all worlds.

    Args:
        original: the checkout's ``forward_backward_func``.
    """
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    samples = get_current_global_batch_size()
    own = run.stack.share(samples)
    given["num_microbatches"] = given["num_microbatches"] * own // samples
    return _of_all_worlds(run, original(**given) if own else _compute_nothing(run))


def catch_up(run: Run) -> Received:
    """Take over the state of another world, while zero gradients are exchanged. The trainer's position is set to it."""
    _clear_gradients(run)
    run.stack.catching_up()
    losses = _of_all_worlds(run, _compute_nothing(run))
    groups = [group for chunk in run.chunks for group in step_state.bucket_groups(chunk)]
    live = [bucket.grad_data for group in groups for bucket in group.buckets]
    gradients = [(tensor, tensor.to("cpu", copy=True)) for tensor in live]
    run.stack.caught_up()
    return Received(losses, gradients)


def rehearse(run: Run, samples: int) -> None:
    """Run forward and backward passes before the trainer's loop is entered, and discard the results.

    Args:
        samples: number of samples, over all data-parallel ranks of this world.
    """
    own, config, several = run.args, run.config, len(run.chunks) > 1
    iterators = run.iterators.training
    _clear_gradients(run)
    if own.overlap_grad_reduce:  # as the trainer's loop sets it, and expects to find it unset
        contexts = [chunk.no_sync for chunk in run.chunks]
        config.no_sync_func = contexts if several else contexts[0]
    losses = tree.module("training").get_forward_backward_func()(
        forward_step_func=run.forward_step,
        data_iterator=iterators if several else iterators[0],
        model=run.chunks,
        num_microbatches=samples // (own.micro_batch_size * parallel_state.get_data_parallel_world_size()),
        seq_length=own.seq_length,
        micro_batch_size=own.micro_batch_size,
        decoder_seq_length=own.decoder_seq_length,
        forward_only=False,
    )
    config.no_sync_func = None
    _note_name(run, losses)


def _clear_gradients(run: Run) -> None:
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


def _compute_nothing(run: Run) -> Losses:
    """Exchange zero gradients, without a forward or backward pass."""
    step_state.expect_no_backward(run.chunks)
    tokens = torch.zeros([], dtype=torch.int, device=run.device)
    run.config.finalize_model_grads_func(run.chunks, tokens if run.config.calculate_per_token_loss else None)
    return []


def _of_all_worlds(run: Run, losses: Losses) -> Losses:
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return losses
    _note_name(run, losses)
    return [{run.loss_name: total} for total in run.stack.reduce([each[run.loss_name] for each in losses])]


def _note_name(run: Run, losses: Losses) -> None:
    if losses:
        run.loss_name = loss_name(losses)


def loss_name(reports: Sequence[Any]) -> str:
    """Return the name of the loss that the script's loss function reports.

    Args:
        reports: what it has reported for each microbatch, of at least one.

    Raises:
        UserError: it does not report exactly one loss as a tensor [sum, number of tokens], under the same name for
            every microbatch.
    """
    names = [next(iter(report)) if _is_one_loss(report) else None for report in reports]
    if names[0] is None or set(names) != {names[0]}:
        shown = "; ".join(dict.fromkeys(map(_shown, reports)))
        problem = f"the loss function reports {shown}; replicas add up one loss, a tensor [sum, number of tokens]"
        raise UserError(problem, "report the loss as pretrain_gpt.py does, or train without replicas")
    return names[0]


def _is_one_loss(report: Any) -> bool:
    values = list(report.values()) if isinstance(report, dict) else []
    return len(values) == 1 and torch.is_tensor(values[0]) and values[0].numel() == 2


def _shown(report: Any) -> str:
    values = report if isinstance(report, dict) else {"a value that is no dict": report}
    kinds = (
        f"{value.numel()} numbers" if torch.is_tensor(value) else f"a {type(value).__name__}"
        for value in values.values()
    )
    return ", ".join(f"{name} ({kind})" for name, kind in zip(values, kinds, strict=True)) or "nothing"
