"""With every operator executed twice, training computes what it computes without, bit for bit; and what is computed
wrongly once is computed once more."""

import tomllib
from pathlib import Path

import dmr_jobs
import pytest
import small_runs as runs

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
LAYOUTS = tomllib.loads(Path(__file__).with_name("dmr_training.toml").read_text())


def in_every_way(flags: str, folder: Path | None) -> dict:
    """How a step comes out without DMR, naively, with piggybacking and, given a folder for it, by plan, from the same
    state; two steps each."""
    job = dmr_jobs.assemble(flags)
    again = dmr_jobs.Again(job)
    found = {"off": (again.step(), again.step())}
    for way in ("naive", "piggyback") if folder is None else ("naive", "piggyback", "plan"):
        dmr_jobs.protection(job, dmr_jobs.plan_of(job, folder) if way == "plan" else way)
        found[way] = (again.step(), again.step())
        counts = job.protection.layers[0].engine.coverage()
        found[way + " covers"] = counts
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_the_same_bit_for_bit(name, ranks, corpus, tmp_path):
    layout = LAYOUTS[name]
    folder = tmp_path if "planned" in layout else None
    of_ranks = ranks(in_every_way, layout["ranks"], f"{runs.BASE} {layout['flags']} --data-path {corpus}", folder)
    for found in of_ranks:
        first = found["off"][0]
        for way in ("off", "naive", "piggyback", *(["plan"] if folder else [])):
            for step in found[way]:
                assert (step.state, step.grad_norm) == (first.state, first.grad_norm), way
        assert set(found["naive covers"]) <= {"naive", "in windows", "early", "late", "unverified"}
        assert ("P" in found["piggyback covers"]) == ("recompute" in layout["flags"])
        assert not found["piggyback covers"]["unverified"]
        assert not folder or not found["plan covers"]["unverified"]
    # which rank of a pipeline waits for the other depends on the machine's load while the profile was taken
    assert not folder or any(found["plan covers"]["in windows"] for found in of_ranks)


class Flip:
    """Flips a bit in the result of one execution, ``times`` times.

    Args:
        wanted: execution, phase and operator, and if need be microbatch and index.
    """

    def __init__(self, *wanted, times: int = 1):
        self.wanted, self.times, self.hit = wanted, times, []

    def falsify(self, execution, operator, cursor, tensors):
        self._flip((execution, cursor.unit.phase, operator, cursor.unit.microbatch, cursor.unit.index - 1), tensors)

    def deferred(self, at, tensors):
        self._flip(("checker", at.phase, at.operator, at.microbatch, at.index), tensors)

    def _flip(self, which, tensors):
        import torch

        if self.times and which[: len(self.wanted)] == self.wanted and tensors[0].numel():
            self.times -= 1
            flat = tensors[0].view(-1).view(torch.uint8)
            flat[3 % flat.numel()].bitwise_xor_(64)
            self.hit.append(which)


def a_lasting_fault(flags: str, way: str, wanted: tuple) -> tuple[str, set[int]]:
    """Return what DMR decides where rank 1 computes an operator wrongly in each attempt, and who has mismatches."""
    import torch.distributed as dist

    from ft.systems.dmr.runtime.protection import CorruptionError

    job = dmr_jobs.assemble(flags)
    again = dmr_jobs.Again(job)
    again.step()
    protection = dmr_jobs.protection(job, way)
    protection.engine.mode._disturbance = Flip(*wanted, times=1000 if dist.get_rank() == 1 else 0)
    told: list = []
    protection._witness.mismatch = lambda step, attempt, reports, outcome: told.append(set(reports))
    try:
        again.step()
    except CorruptionError as error:
        return str(error), set.union(*told)
    finally:
        protection.undo.roll_back()
    return "nothing", set()


@pytest.mark.parametrize(
    "operator, more",
    [
        ("mm", ""),
        ("mm", "--sequence-parallel "),
        ("native_layer_norm", "--sequence-parallel "),
        ("add.Tensor", ""),
        pytest.param("native_layer_norm", "", marks=pytest.mark.long),
        pytest.param("add.Tensor", "--sequence-parallel ", marks=pytest.mark.long),
    ],
)
def test_a_lasting_fault_is_blamed_on_its_rank_where_others_compute_with_its_results(operator, more, ranks, corpus):
    flags = f"{runs.BASE} {FULL} {more} --tensor-model-parallel-size 2 --data-path {corpus}"
    found = ranks(a_lasting_fault, 2, flags, "piggyback", ("primary", "forward", operator))
    for said, wrong in found:
        assert "rank 1" in said and "not reproducible" not in said, said
        assert wrong == {0, 1} or operator != "mm", "what rank 0 has received differs in the recomputation"


def flips_of_what_waits(flags: str, folder: Path, hit_rank: int) -> dict:
    """By plan: a flip in each execution of an operator that waits for a window by itself, and of one that waits in an
    AGC segment, where the plan has such."""
    import torch.distributed as dist

    from ft.systems.dmr.plan.file import read_plan

    job = dmr_jobs.assemble(flags)
    again, steps = dmr_jobs.Again(job), []
    clean = again.step()
    path = dmr_jobs.plan_of(job, folder)
    plan, protection = read_plan(path), dmr_jobs.protection(job, path)
    waiting: dict[bool, tuple] = {}
    for op in plan.trace.ops:
        how = plan.assign[op.id]
        if op.stage == hit_rank and how.window is not None:
            waiting[how.agc_segment is None] = (op.phase, op.name, op.microbatch, int(op.id.split(".")[-1]))
    for which in waiting.values():
        for execution in ("primary", "checker"):
            flip = Flip(execution, *which, times=int(dist.get_rank() == hit_rank))
            protection.engine.mode._disturbance, protection.engine.queue.disturb = flip, flip.deferred
            told = []
            protection._witness.mismatch = lambda step, attempt, reports, outcome, told=told: told.append(
                (reports, outcome)
            )
            steps.append((which, again.step(), told, flip.hit))
    return {"clean": clean, "steps": steps}


def test_a_flip_in_what_waits_for_a_window_is_found_there_and_made_good(ranks, corpus, tmp_path):
    flags = f"{runs.BASE} {FULL} --pipeline-model-parallel-size 2 --data-path {corpus}"
    found = ranks(flips_of_what_waits, 2, flags, tmp_path, 1)
    assert len(found[1]["steps"]) >= 2 and all(hit for *_, hit in found[1]["steps"])
    for one in found:
        for which, after, ((reports, outcome),), _ in one["steps"]:
            assert (after.state, after.grad_norm) == (one["clean"].state, one["clean"].grad_norm), which
            assert set(reports) == {1} and outcome.action == "retry"
            assert any((each.at.operator, each.how) == (which[1], "window") for each in reports[1]), which
