"""Bit flips on purpose: what they do to memory, and that DMR makes them good.

What they are asked for with is in ``conversations/faults/specs.txt``.
"""

import random
import sys
from pathlib import Path

import pytest
import small_runs as runs
import torch
from ft_runs import flags, ft_run

from ft.faults.flip import CHECKER, PRIMARY, REPEAT, STUCK, Flip
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.injection import Falsifier, bits_of, flip_bit, force_bit

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools" / "experiments"))


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def layouts(dtype: torch.dtype):
    tensor = (torch.arange(48) % 2).to(dtype)
    yield "contiguous", tensor.clone().view(6, 8)
    yield "transposed", tensor.clone().view(6, 8).t()
    yield "sliced", tensor.clone().view(6, 8)[1:5:2, 3:]
    yield "a number", tensor.clone()[5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exactly_one_bit_of_one_element_changes(dtype):
    draw = random.Random(f"{dtype}")
    for name, tensor in layouts(dtype):
        element, bit = draw.randrange(tensor.numel()), draw.randrange(bits_of(dtype))
        before = tensor.clone()
        version = tensor._version
        flip_bit(tensor, element, bit)
        a, b = (bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in (before, tensor))
        differing = [(i, x ^ y) for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        place, mask = divmod(bit, 8)
        assert differing == [(element * dtype.itemsize + place, 1 << mask)], name
        assert tensor._version == version, "autograd takes no notice"
        assert not force_bit(tensor, element, bit, int(bool(differing and b[differing[0][0]] & 1 << mask)))
        flip_bit(tensor, element, bit)
        assert torch.equal(tensor, before)


def hits_of(flip: Flip, executions: int = 40, values=(0,) * 8):
    """(pair, execution) that were hit, where every operator is executed twice at once."""
    told, values = [], torch.tensor(values, dtype=torch.int32)
    falsifier, cursor, found = Falsifier(told.append), ExecutionCursor(), []
    falsifier.arm(1, flip)
    for number in range(executions):
        cursor.executed += 1
        for execution in (PRIMARY, CHECKER):
            result = values.clone()
            falsifier.falsify(execution, "mm", cursor, [result])
            if not torch.equal(result, values):
                found.append((number, execution))
    assert len(told) == len(found)
    return found


def test_how_often_it_hits():
    assert hits_of(Flip()) == [(0, PRIMARY)]
    assert hits_of(Flip(nth=4)) == [(1, CHECKER)]
    assert hits_of(Flip(execution=CHECKER, nth=3)) == [(2, CHECKER)]
    assert hits_of(Flip("add")) == [] == hits_of(Flip(), values=())
    assert hits_of(Flip(mode=REPEAT), 3) == [(n, e) for n in range(3) for e in (PRIMARY, CHECKER)]
    assert 20 < len(hits_of(Flip(mode=REPEAT, probability=0.5))) < 60
    assert len(hits_of(Flip(probability=0.05, seed=3), 400)) == 1


def test_a_stuck_bit_is_met_by_one_of_two_executions_and_may_be_right(seed):
    zeros = hits_of(Flip(mode=STUCK, seed=seed), 60)
    ones = hits_of(Flip(mode=STUCK, seed=seed), 60, values=(-1,) * 8)
    found = zeros or ones
    assert not (zeros and ones), "the bit is 0 or 1, not both"
    assert [number for number, _ in found] == list(range(60))
    assert {execution for _, execution in found} == {PRIMARY, CHECKER}


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def train_twice(given: str) -> dict:
    """Trains with DMR; what was flipped and found here, and the steps that came out clean after that."""
    from ft.systems.dmr.runtime import injection, protection
    from megatron import patches
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    told = {"hits": [], "wrong": [], "clean": []}

    class Hits(injection.FlipReporter):
        def tell(self, hit):
            told["hits"].append((self._step(), hit.operator, hit.phase, hit.execution))

    class Witness(protection.FindingReporter):
        def mismatch(self, step, attempt, reports, outcome):
            told["wrong"].append((step, attempt, sorted(reports), outcome.action))

        def clean(self, step, attempt):
            told["clean"].append((step, attempt))

    from ft.systems.dmr import layer

    injection.FlipReporter, layer.FindingReporter = Hits, Witness
    runs.run(given)
    return told


@pytest.mark.newest
def test_one_flip_makes_all_ranks_take_the_step_again(ranks, corpus, tmp_path):
    base = (
        f"{runs.BASE} --data-path {corpus} --train-iters 6 --attention-dropout 0.1 --hidden-dropout 0.1 {RECOMPUTED} "
    )
    base += "--pipeline-model-parallel-size 2 --metrics-file"
    ranks(runs.run, 2, f"{base} {tmp_path}/clean.jsonl")
    specs = (
        "bit-flip@step=2:rank=1:operator=mm:phase=forward bit-flip@step=3:rank=0:operator=p2p "
        "bit-flip@step=4:rank=0:phase=recompute:operator=native_layer_norm,"
        "bit-flip@step=5:rank=1:phase=backward:execution=checker "
        "--ft-dmr-inject bit-flip@step=6:rank=0:phase=optimizer:operator=*mul*:execution=primary"
    )
    flipped = f"{base} {tmp_path}/flipped.jsonl --ft-dmr piggyback --ft-dmr-inject {specs}"
    first, second = ranks(train_twice, 2, flipped)
    assert runs.losses(tmp_path / "flipped.jsonl") == runs.losses(tmp_path / "clean.jsonl")
    assert first["wrong"] == second["wrong"]
    assert first["wrong"] == [(2, 1, [1], "retry"), *((step, 1, [int(step == 5)], "retry") for step in (3, 4, 5, 6))]
    assert first["clean"] == [(step, 2) for step in (2, 3, 4, 5, 6)]
    hits = {hit[0]: hit[1:] for hit in (*first["hits"], *second["hits"])}
    assert len(first["hits"]) == 3 and len(second["hits"]) == 2
    assert hits[2] == ("mm", "forward", "primary")
    assert hits[3] == ("p2p", "backward", None)
    assert hits[4] == ("native_layer_norm", "recompute", "checker")
    assert hits[5][1:] == ("backward", "checker")
    assert hits[6][1:] == ("optimizer", "primary")


def flips_everywhere(flags: str, count: int) -> dict[str, int]:
    """Outcomes of flips of random results of an iteration, each from the same state."""
    from collections import Counter

    import dmr_jobs
    from dmr_detection_lab import Case, Lab, flips_of

    case = Case(1, "piggyback", flags)
    result = flips_of(Lab(dmr_jobs.assemble(flags), case.way), case, count, seed=count)
    return {"false alarms": result["false_alarms"], **Counter(flip["outcome"] for flip in result["flips"])}


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_flips_of_every_operator_are_found(precision, ranks, corpus):
    import dmr_detection

    flags = f"{runs.BASE} {dmr_detection.TINY} --attention-dropout 0.1 {RECOMPUTED} {precision} --data-path {corpus}"
    (found,) = ranks(flips_everywhere, 1, flags, 60)
    assert found.pop("false alarms") == 0
    assert sum(found.values()) == 60
    assert set(found) <= {"found", "error"}


def flips_in_memory(flags: str, way: str, count: int, seed: int) -> dict:
    import dmr_jobs
    from dmr_detection_lab import Case
    from dmr_storage_flips import trials

    job, world = dmr_jobs.assemble(flags), 2 if "parallel-size 2" in flags else 1
    return trials(job, Case(world, way, flags), way, count, seed, stop_after=60.0)


@pytest.mark.parametrize(
    "world, way, more",
    [
        (1, "piggyback", RECOMPUTED),
        (1, "naive", "--bf16 --attention-dropout 0.1 "),
        pytest.param(
            2, "piggyback", f"--tensor-model-parallel-size 2 --sequence-parallel {RECOMPUTED}", marks=pytest.mark.long
        ),
    ],
)
def test_flips_in_memory_by_an_injector_that_does_not_know_dmr_are_found(world, way, more, ranks, corpus, seed):
    import dmr_detection

    flags = f"{runs.BASE} {dmr_detection.TINY} {more} --data-path {corpus}"
    for found in ranks(flips_in_memory, world, flags, way, 15, seed):
        assert not found["alarms"]
        assert not [flip for flip in found["flips"] if flip["outcome"] == "missed"]
        assert sum(flip["outcome"] == "found" for flip in found["flips"]) > len(found["flips"]) // 2


@pytest.mark.parametrize(
    "mode", [pytest.param(REPEAT, marks=pytest.mark.long), pytest.param(STUCK, marks=pytest.mark.newest)]
)
def test_a_device_that_computes_wrongly_again_and_again_is_replaced(mode, corpus, reference, tmp_path):
    layout, which = f"--use-distributed-optimizer {RECOMPUTED}", "operator=mm:bit=20"
    done = ft_run(
        tmp_path / "run",
        flags(corpus, f"{layout} --ft-dmr piggyback", 14),
        nproc=2,
        options=f"--inject bit-flip@step=5:rank=1:{which}:mode={mode}",
    )
    assert done.code == 0, done.explain()
    (detected,) = [event for event in done.named("fault_detected") if event.rank is not None]
    assert (detected.rank, detected.detail["action"]) == (1, "replace"), done.explain()
    flipped = done.named("bit_flipped")
    assert {(event.rank, event.worker) for event in flipped} == {(1, detected.worker)}, (
        "its successor is another device"
    )
    assert [event.detail["number"] for event in done.named("fault_injected")] == [1]
    assert done.losses == reference(2, layout, 14), done.explain()
