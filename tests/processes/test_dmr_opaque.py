"""Calls whose kernels bypass torch's dispatcher are executed twice as a whole, with all their effects."""

import shutil

import dmr_jobs
import planted_kernels as planted
import pytest
import small_runs as runs
import torch

from ft.systems.dmr.runtime import functions

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler (apt install gcc)")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
FLAGS = f"{runs.BASE} --mock-data --num-layers 2 --global-batch-size 4 --hidden-dropout 0.1 --attention-dropout 0.1 "


def step_of(again) -> tuple:
    planted.forget()
    taken = again.step()
    return taken.state, taken.loss, taken.grad_norm, planted.kept()


def in_every_way(name: str, flags: str) -> dict:
    functions._AFTERWARDS = (("planted_kernels", "Flags", "update"),)
    job = dmr_jobs.assemble(flags)
    planted.plant(job.trainee.chunks, name)
    again = dmr_jobs.Again(job)
    found = {"off": [step_of(again)]}
    for way in ("naive", "piggyback"):
        verifier = dmr_jobs.protection(job, way)
        found[way] = [step_of(again) for _ in range(3)]
        found[way + " covers"] = verifier.engine.coverage()
    return found


FAULTLESS = ("WithHistory", "First", "Placeholder", "Unwritten", "Loose", "OfLayer")
"""Functions in the default tier; of the others, a step after a fault in them is compared with one without DMR."""


@pytest.mark.parametrize("flags", [pytest.param("", marks=pytest.mark.long), FULL])
@pytest.mark.parametrize(
    "name",
    [*FAULTLESS, *(pytest.param(name, marks=pytest.mark.long) for name in planted.PLACES if name not in FAULTLESS)],
)
def test_a_step_is_the_same_bit_for_bit_and_effects_count_once(name, flags, ranks):
    world = 2 if name == "Gathering" else 1
    for found in ranks(in_every_way, world, name, FLAGS + flags):
        for way in ("naive", "piggyback"):
            assert all(step == found["off"][0] for step in found[way]), way
            assert bool(found[way + " covers"].get("opaque")) == (name != "Loose")
            assert not found[way + " covers"]["unverified"]


def with_faults(name: str, flags: str, way: str, hit_rank: int) -> tuple[dict[str, int], list]:
    """Return how often the function computes each thing, and what follows from a fault in each of these executions."""
    import torch.distributed as dist

    from ft.systems.dmr.runtime.suspects import AttemptLimits, WrongAttempts

    job = dmr_jobs.assemble(flags)
    planted.plant(job.trainee.chunks, name)
    again = dmr_jobs.Again(job)
    clean = step_of(again)
    verifier = dmr_jobs.protection(job, way)
    told = []
    verifier._witness.mismatch = lambda step, attempt, reports, outcome: told.append(reports)
    step_of(again)  # what functions change is learnt
    planted.fault.arm()
    step_of(again)
    counts, found = dict(planted.fault.seen), []
    for place in planted.PLACES[name]:
        for due in range(counts[place]):
            told.clear()
            verifier._memory = WrongAttempts(
                AttemptLimits().memory
            )  # otherwise the rank would be suspected of a lasting fault
            if dist.get_rank() == hit_rank:
                planted.fault.arm(place, due)
            else:
                planted.fault.arm()
            result = step_of(again)
            named = {one.at.operator for reports in told for one in reports.get(hit_rank, ())}
            found.append((place, due, [len(told), named], result[:3] == clean[:3]))
    return counts, found


WITHOUT_RECOMPUTATION = ("Scaled", "Gathering")
"""Functions in the default tier that are also tried without recomputation, one without communication and one with it;
most functions are executed in the same way with and without it."""


@pytest.mark.parametrize(
    "name, way, flags",
    [
        *((name, "piggyback", FULL) for name in planted.PLACES),
        *(
            pytest.param(name, "naive", "", marks=() if name in WITHOUT_RECOMPUTATION else pytest.mark.long)
            for name in planted.PLACES
        ),
    ],
)
def test_a_fault_in_either_execution_is_found_and_the_step_repeated(name, way, flags, ranks):
    world = 2 if name == "Gathering" else 1
    for counts, found in ranks(with_faults, world, name, FLAGS + flags, way, world - 1, timeout=300):
        # each layer and microbatch; with recomputation only what changes something is executed twice in both passes
        executions = 4 if way == "piggyback" and name == "WithHistory" else 2
        assert counts[planted.PLACES[name][0]] == executions * 2 * 2 // world
        assert len(found) >= 2 * 2 * 2 // world  # layers, executions, microbatches
        for place, due, (attempts, named), is_clean in found:
            assert attempts == 1, (place, due)
            assert any(f"planted_kernels.{name}." in operator for operator in named), (place, due, named)
            # what a function keeps between steps is not part of the state that DMR restores
            assert is_clean or name == "WithHistory", (place, due)


@pytest.mark.on_ranks(1)
def test_a_function_that_is_defined_within_a_step_is_executed_twice():
    job = dmr_jobs.assemble(FLAGS)
    made = []

    def after(module, inputs, outputs):
        class Late(torch.autograd.Function):
            forward = staticmethod(lambda ctx, x: x * 1.5)
            backward = staticmethod(lambda ctx, gradient: gradient * 1.5)

        made.append(Late)
        return Late.apply(outputs[0]), outputs[1]

    layer = next(module for module in job.trainee.chunks[0].modules() if type(module).__name__ == "MLP")
    layer.register_forward_hook(after)
    verifier = dmr_jobs.protection(job, "naive")
    dmr_jobs.Again(job).step()
    assert verifier.engine.coverage()["opaque"] == 2 * len(made) > 0, "forward and backward of each"


@pytest.mark.on_ranks(1)
def test_the_configuration_of_a_layer_leads_no_further():
    from ft.systems.dmr.runtime.opaque import Reachable

    job = dmr_jobs.assemble(FLAGS)
    dmr_jobs.protection(job, "naive")
    layer = next(module for module in job.trainee.chunks[0].modules() if type(module).__name__ == "MLP").linear_fc1
    found = Reachable({"layer": layer})
    assert len(found._seen) < 40 and len(found.tensors) <= 4, "weight, bias, and their gradient buffers"


def always_wrong(name: str, flags: str, way: str) -> str:
    """Return what DMR decides where rank 1 computes something wrongly in each attempt."""
    import torch.distributed as dist

    from ft.systems.dmr.runtime.protection import CorruptionError

    job = dmr_jobs.assemble(flags)
    planted.plant(job.trainee.chunks, name)
    again = dmr_jobs.Again(job)
    verifier = dmr_jobs.protection(job, way)
    for _ in range(2):
        step_of(again)
    planted.fault.arm(planted.PLACES[name][0], 1 if dist.get_rank() == 1 else -1)
    planted.fault.is_lasting = True
    try:
        step_of(again)
    except CorruptionError as error:
        return str(error)
    finally:
        planted.fault.is_lasting = False
        verifier.undo.roll_back()
    return "nothing"


@pytest.mark.parametrize("way, flags", [("naive", ""), ("piggyback", FULL)])
def test_a_lasting_fault_before_communication_within_a_call_is_blamed_on_its_rank(way, flags, ranks):
    for said in ranks(always_wrong, 2, "Gathering", FLAGS + flags, way):
        assert "rank 1" in said and "not reproducible" not in said, said


def not_reproducible(flags: str, folder) -> tuple:
    import torch.distributed as dist

    from ft.systems.dmr.plan.file import Unstable, write_unstable
    from ft.systems.dmr.runtime.protection import CorruptionError

    job = dmr_jobs.assemble(flags)
    planted.plant(job.trainee.chunks, "NotReproducible")
    again = dmr_jobs.Again(job)
    verifier = dmr_jobs.protection(job, "naive")
    try:
        again.step()
        refused = ""
    except CorruptionError as error:
        refused = str(error)
    again._undo.roll_back()
    name = "planted_kernels.NotReproducible.forward"
    folder = folder / str(dist.get_rank())
    folder.mkdir()
    write_unstable(folder / "unstable.json", Unstable((name,), "", "cpu"))
    verifier = dmr_jobs.protection(job, "naive", unstable=folder / "unstable.json")
    again.step()
    return refused, verifier.engine.coverage()


def test_a_function_that_is_not_reproducible_is_named_and_can_be_left_out(ranks, tmp_path):
    for refused, covers in ranks(not_reproducible, 2, FLAGS, tmp_path):
        assert "planted_kernels.NotReproducible.forward" in refused
        assert covers["unchecked"] == covers["opaque"] == 2  # layers; the backward passes are compared


@pytest.mark.on_ranks(1)
def test_a_change_that_was_not_known_is_found_and_learnt():
    from ft.systems.dmr.runtime.findings import BEFORE

    job = dmr_jobs.assemble(FLAGS)
    planted.plant(job.trainee.chunks, "Late")
    again = dmr_jobs.Again(job)
    verifier = dmr_jobs.protection(job, "naive")
    told = []
    verifier._witness.mismatch = lambda step, attempt, reports, outcome: told.append(reports)
    counts = []
    for planted.STATE.is_late in (False, True, True):
        told.clear()
        step_of(again)
        counts.append([one.how for reports in told for one in reports[0]])
    before, first, then = counts
    assert not before and not then, counts
    assert first and set(first) == {BEFORE}
