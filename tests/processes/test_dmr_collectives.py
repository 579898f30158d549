"""A communication library that brings wrong results or messages is found out.

The flips here are made below torch.distributed, where DMR has no hook.
"""

import tomllib
from pathlib import Path

import dmr_jobs
import pytest
import small_runs as runs
import test_checkfree_plus

METHODS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        *("_allgather_base", "all_gather_single", "allgather"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    "reduce_scatter": (
        *("_reduce_scatter_base", "reduce_scatter_single"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    "all_to_all": ("alltoall_base", "all_to_all_single"),
    "message": ("recv",),  # of send and recv, isend and irecv, and batch_isend_irecv
}
"""Names of the methods of process groups, of several releases of torch."""


class Library:
    """Flips a bit in the result of one call of torch's process groups; it knows nothing of DMR.

    Args:
        kind: of the calls.

    Attributes:
        calls: number of calls since the last ``arm`` that a flip could have hit.
    """

    def __init__(self, kind: str):
        import torch.distributed as dist

        self.calls, self.due, self.bit, self.hit = 0, None, 0, []
        for name in METHODS[kind]:
            real = getattr(dist.ProcessGroup, name, None)
            if real is not None:
                setattr(dist.ProcessGroup, name, self._wrapped(real))

    def arm(self, due: int | None, bit: int) -> None:
        self.calls, self.due, self.bit, self.hit = 0, due, bit, []

    def _wrapped(self, real):
        def call(group, outputs, *rest):
            import torch

            work = real(group, outputs, *rest)
            flat = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            flat = [one for each in flat for one in (each if isinstance(each, list | tuple) else [each])]
            if group.size() == 1 or not flat[0].is_floating_point() or flat[0].itemsize == 8 or not flat[0].numel():
                return work  # of integers, of DMR's own sums, or nothing that leaves this rank
            self.calls += 1
            return _Wrong(work, lambda: self._flip(flat[0])) if self.calls - 1 == self.due else work

        return call

    def _flip(self, tensor) -> None:
        import torch

        with torch._C._DisableTorchDispatch():
            at = int(tensor.abs().argmax())
            whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            before = tensor.reshape(-1)[at].item()
            tensor.view(-1).view(whole)[at] ^= 1 << self.bit
            self.hit.append((list(tensor.shape), before, tensor.reshape(-1)[at].item()))


class _Wrong:
    """The handle of a collective whose result is wrong as soon as somebody has waited for it."""

    def __init__(self, work, flip):
        self._work, self._flip = work, flip

    def wait(self, *args):
        done = self._work.wait(*args)
        flip, self._flip = self._flip, None
        if flip is not None:
            flip()
        return done

    def __getattr__(self, name):
        return getattr(self._work, name)


def wrong_results(flags: str, kind: str, bits: list, hit_ranks: list) -> dict:
    """Two steps, again and again, with a flip in another call each time, on ``hit_ranks``."""
    import torch.distributed as dist

    from megatron.ft_trainer.loop import train_step

    library = Library(kind)
    job = _swapped(flags) if "--ft-checkfree-plus" in flags else dmr_jobs.assemble(flags)
    again, found = dmr_jobs.Again(job), []

    def two_steps():
        again._undo.begin()
        again._undo.wait()
        for _ in range(2):
            train_step(job)
        state = again._state()
        again._undo.roll_back()
        return state

    clean = two_steps()
    protection = dmr_jobs.protection(job, "piggyback")
    told = []
    protection._witness.mismatch = lambda step, attempt, reports, outcome: told.append((reports, outcome))
    library.arm(None, 0)
    two_steps()
    assert not told, told
    calls = library.calls
    for number in sorted({*range(0, calls, max(1, calls // 6)), calls - 1}):
        library.arm(number if dist.get_rank() in hit_ranks else None, bits[number % len(bits)])
        told.clear()
        is_clean = two_steps() == clean
        hows = sorted(
            {(one.at.operator, one.how) for reports, _ in told for found in reports.values() for one in found}
        )
        found.append((number, library.hit, len(told), hows, is_clean))
    return {"calls": calls, "found": found, "unverified": protection.engine.coverage()["unverified"]}


def _swapped(flags: str):
    """Build a job in which microbatches pass the stages in two orders."""
    from megatron import patches
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    return test_checkfree_plus.assemble(flags)[0]


CASES = tomllib.loads(Path(__file__).with_name("dmr_collectives.toml").read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if "long" in case else ()) for name, case in CASES.items()]
)
def test_a_wrong_result_inside_the_library_is_seen_and_the_step_taken_once_more(name, ranks, corpus):
    case = CASES[name]
    flags = f"{runs.BASE} {case['flags']} --data-path {corpus}"
    how = case["kind"], case["bits"], case["hit"]
    everybody = ranks(wrong_results, case["ranks"], flags, *how, timeout=170)
    if case["kind"] == "message":  # unlike sums, they are compared bit for bit
        unseen = [one for found in everybody for one in found["found"] if one[1] and not one[2]]
        assert not unseen, everybody
    for found in everybody:
        assert found["calls"] and not found["unverified"], everybody
        missed = [one for one in found["found"] if not one[4]]
        assert not missed, [each["found"] for each in everybody]
        assert any(attempts for _, _, attempts, _, _ in found["found"]), everybody
