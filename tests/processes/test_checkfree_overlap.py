"""CheckFree+ reduces gradients during the backward passes, and computes the same bits as if it did so after them."""

import pytest
from checkfree_jobs import assemble
from test_checkfree_plus import PP4, SHAPE, TIED, UNTIED


def reduced(flags: str, at_end: bool) -> list[tuple]:
    """After each step: its loss and gradient norm, the parameters' bits, and the share of bucket groups that began to
    reduce in the backward passes. ``at_end``: none of them may begin there."""
    import torch

    from ft.systems.checkfree import plus
    from megatron.ft_trainer.loop import train_step
    from megatron.patches import step_state
    from megatron.patches.replace import wrap_attribute
    from megatron.patches.step_state import bucket_groups

    job, _ = assemble(flags)
    chunk, started, found = job.trainee.chunks[0], [], []
    if at_end:
        plus.EarlyReduction.before = lambda *_: None
        begin = plus.EarlyReduction.__init__

        def none(self, *given) -> None:
            begin(self, *given)
            for group in bucket_groups(chunk):
                step_state.start_at_end(group)

        plus.EarlyReduction.__init__ = none

    def look(finalize, *given, **groups) -> None:
        all_groups = bucket_groups(chunk)
        started.append(sum(group.grad_reduce_handle is not None for group in all_groups) / len(all_groups))
        finalize(*given, **groups)

    wrap_attribute(chunk.config, "finalize_model_grads_func", look)
    torch.manual_seed(1)
    for _ in range(3):
        report = train_step(job)
        bits = b"".join(p.detach().float().numpy().tobytes() for p in chunk.parameters())
        found.append((repr(report.loss), report.grad_norm, bits))
    return [(found, started)]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(UNTIED + "--use-distributed-optimizer --ddp-num-buckets 4", id="sharded optimizer"),
        pytest.param(TIED + "--ddp-num-buckets 3 --bf16", id="tied, replicated optimizer"),
        pytest.param(UNTIED + "--use-distributed-optimizer --ddp-bucket-size 100000000", id="one bucket"),
    ],
)
def test_early_reductions_give_the_same_bits(extra, ranks, corpus):
    flags = f"{SHAPE} {PP4} {extra} --overlap-grad-reduce --data-path {corpus}"
    late = ranks(reduced, 8, flags, True)
    early = ranks(reduced, 8, flags, False)
    for ((was, none),), ((now, started),) in zip(late, early, strict=True):
        assert none == [0, 0, 0] and started == [0, 1, 1], "core learns in its first batch what a bucket waits for"
        assert was == now
