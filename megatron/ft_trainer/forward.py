"""The forward step: one microbatch through one model chunk, as megatron-core's schedules call it."""

import math
from functools import partial

import torch

from ft.base.errors import FtError
from ft.base.step_clock import CLOCK, DATA
from megatron.patches.releases import batch_of_this_context_rank


class NonFiniteLossError(FtError):
    """The loss of a microbatch is NaN or infinite: the run has diverged, or a device computes wrong results."""


def make_forward_step(check_finite: bool):
    """Return the forward step for megatron-core's ``forward_backward_func``.

    Args:
        check_finite: whether to raise ``NonFiniteLossError`` on the last stage if a loss is NaN or infinite, before its
            backward pass.
    """

    def forward_step(loader, chunk):
        """Run ``chunk`` on the loader's next microbatch. Stages between the first and the last have no loader.

        Returns:
            (output, loss function): per-token losses [micro batch, sequence] on the last stage, activations before it.
        """
        batch = _on_device(CLOCK.during(DATA, next, loader)) if loader is not None else {}
        output = chunk(
            batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
        )
        return output, partial(masked_loss, batch.get("loss_mask"), check_finite=check_finite)

    return forward_step


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor, *, check_finite: bool):
    """Return the sum of the losses of unmasked tokens.

    Args:
        loss_mask: 1 for tokens that count and 0 for others, [micro batch, sequence].
        losses: loss of each token, [micro batch, sequence].
        check_finite: whether to raise ``NonFiniteLossError`` if the sum is NaN or infinite.

    Returns:
        (sum with gradient, number of tokens as int tensor, values to report: [sum, number] as fp32).
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum()
    if check_finite:
        refuse_non_finite(loss.item())
    return loss, tokens.detach().to(torch.int), torch.stack([loss.detach(), tokens])


def refuse_non_finite(loss: float) -> None:
    """Raise NonFiniteLossError for NaN and infinity."""
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss of a microbatch is {loss}: training has diverged")


def _on_device(batch: dict) -> dict:
    moved = {name: None if value is None else value.cuda(non_blocking=True) for name, value in batch.items()}
    return batch_of_this_context_rank(moved)
