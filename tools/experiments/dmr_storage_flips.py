"""Does DMR find bits that are flipped in memory, by an injector that knows nothing of DMR?

    python tools/experiments/dmr_storage_flips.py --case NAME --flips 500 --into FOLDER    one kind of run
    python tools/experiments/dmr_storage_flips.py --report --into FOLDER                   the table of all results

``dmr_detection.py`` flips bits at DMR's own hooks, so that it cannot see what DMR does not look at. Here a torch
dispatch mode lies below DMR's: it sees every kernel that really runs, in first and second executions alike. A tensor
counts as written if its memory is new or its version has changed; each flip hits one bit of one element of one written
tensor, drawn from all of a step. What DMR computes for itself (digests, comparisons) is not reached: a flip there could
only raise a false alarm.

Each trial takes a whole step, which DMR repeats if it finds something, and compares the state after it with that of a
step without a flip, bit for bit:

- found: DMR has reported a mismatch, and the repeated step is right.
- masked: nothing was reported, and the state is right.
- ended: the step ended with an exception, because a wrong index or size reached a kernel.
- missed: nothing was reported, or the repeated step was wrong.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from dmr_detection import _FOLDER, CASES, ROOT, TINY, assemble, launch, way_of

TABLE = "tools/experiments/results/dmr_storage_flips.txt"
OUTCOMES = ("found", "masked", "ended", "missed")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="flip bits in this kind of run")
    parser.add_argument("--flips", type=int, default=400, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--stop-after", type=float, default=200.0, metavar="S", help="begin nothing after so long")
    parser.add_argument("--into", type=Path, required=True, help="folder for results, one JSON file each")
    parser.add_argument("--report", action="store_true", help="write the table from what is in --into")
    given = parser.parse_args(argv)
    if _FOLDER in os.environ:
        in_rank(given)
        return 0
    given.into.mkdir(parents=True, exist_ok=True)
    if given.case:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            launch(argparse.Namespace(case=given.case, clean=None), argv, Path(folder), script=__file__)
    if given.report:
        text = report(given.into)
        (ROOT / TABLE).write_text(text)
        print(text)
    return 0


def report(folder: Path) -> str:
    """Return the table of all results in ``folder``."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("storage-*.json"))]
    total = Counter(flip["outcome"] for one in results for flip in one["flips"])
    head = f"{total.total()} flips in memory: " + ", ".join(f"{total[name]} {name}" for name in OUTCOMES)
    alarms = sum(one["alarms"] for one in results)
    lines = [head, f"steps without a flip in between: {sum(one['clean'] for one in results)}, alarms: {alarms}", ""]
    lines.append(f"{'run':24}{'ranks':>6} {'way':10}{'written':>8}" + "".join(f"{name:>8}" for name in OUTCOMES))
    for one in results:
        count = Counter(flip["outcome"] for flip in one["flips"])
        numbers = "".join(f"{count[name]:8}" for name in OUTCOMES)
        lines.append(f"{one['case']:24}{one['world']:6} {one['way']:10}{one['written']:8}{numbers}")
    lines += ["", "written: tensors that kernels write in a step of rank 0, first and second executions together"]
    lines += [
        f"missed: {one['case']}: {flip}" for one in results for flip in one["flips"] if flip["outcome"] == "missed"
    ]
    return "\n".join(lines) + "\n"


# --- in a rank -------------------------------------------------------------------------------------------------------


def injector(indices: bool):
    """Return a torch dispatch mode that flips a bit of a tensor that a kernel has just written.

    Args:
        indices: whether results that are not floating-point numbers are flipped, too. With two ranks, an index that is
            out of range would end one rank and leave the other waiting.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from ft.systems.dmr.runtime.injection import bits_of, flip_bit

    class Injector(TorchDispatchMode):
        """``count``: number of tensors that were written since ``arm``; ``hit``: what was flipped."""

        def arm(self, due: int = -1, seed: int = 0) -> None:
            self.count, self.due, self.draw, self.hit = 0, due, random.Random(seed), None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)]
            versions = [each._version for each in given]
            out = func(*args, **(kwargs or {}))
            memory = {each.untyped_storage()._cdata for each in given}
            made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            written = [each for each in made if each.untyped_storage()._cdata not in memory]
            written += [each for each, version in zip(given, versions, strict=True) if each._version != version]
            if "empty" not in str(func):  # a kernel that allocates and writes nothing
                for tensor in written:
                    self._consider(tensor, str(func))
            return out

        def _consider(self, tensor, name: str) -> None:
            if not tensor.numel() or tensor.layout is not torch.strided:
                return
            if not (indices or tensor.is_floating_point()):
                return
            self.count += 1
            if self.count - 1 == self.due:
                element, bit = self.draw.randrange(tensor.numel()), self.draw.randrange(bits_of(tensor.dtype))
                with torch._C._DisableTorchDispatch():
                    flip_bit(tensor, element, bit)
                self.hit = {"kernel": name, "element": element, "bit": bit, "shape": list(tensor.shape)}

    made = Injector()
    made.arm()
    return made


def trials(job, case, way, count: int, seed: int, stop_after: float) -> dict:
    """Take steps from one state, each with a flip, and return their outcomes. Collective."""
    import dmr_jobs
    import torch.distributed as dist

    from ft.systems.dmr.runtime.suspects import AttemptLimits, WrongAttempts

    again, verifier = dmr_jobs.Again(job), dmr_jobs.protection(job, way)
    told: list = []
    verifier._witness.mismatch = lambda step, attempt, reports, outcome: told.append(reports)
    verifier._witness.clean = lambda step, attempt: None
    below, draw = injector(case.indices), random.Random(f"storage {seed}")

    def step(due: int = -1, number: int = 0) -> tuple:
        told.clear()
        verifier._memory = WrongAttempts(AttemptLimits().memory)  # else the rank would be suspected of a lasting fault
        below.arm(due, number)
        with below:
            done = again.step()
        return done.state, repr(done.loss), done.grad_norm  # the loss is NaN on all stages but the last

    for _ in range(3):  # the first steps of a process have kernels that later ones do not have
        clean = step()
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, below.count)
    flips, alarms, steps, began = [], 0, 0, time.monotonic()
    for number in range(count):
        over = [time.monotonic() - began > stop_after]
        dist.broadcast_object_list(over, src=0)
        if over[0]:
            break
        rank = draw.randrange(len(counts))
        due = draw.randrange(counts[rank])
        try:
            right = step(due if dist.get_rank() == rank else -1, draw.randrange(2**40)) == clean
            outcome = "found" if told and right else "masked" if right else "missed"
        except Exception as error:  # a wrong index or size
            if case.world > 1:
                print(f"flip {number} has ended a rank: {error}", flush=True)
                raise
            again._undo.roll_back()
            outcome, right = "ended", True
        all_right = [None] * len(counts)
        dist.all_gather_object(all_right, (right, below.hit))
        if not all(each for each, _ in all_right):
            outcome = "missed"
        hit = next((hit for _, hit in all_right if hit is not None), None)
        if hit is not None:
            flips.append({"rank": rank, "outcome": outcome, **hit})
        if number % 50 == 49:
            steps += 1
            alarms += step() != clean or bool(told)
    return {"written": counts[0], "clean": steps, "alarms": int(alarms), "flips": flips}


def in_rank(given: argparse.Namespace) -> None:
    import small_runs as runs
    import torch.distributed as dist

    from megatron.ft_trainer.arguments import parse
    from megatron.ft_trainer.initialize import destroy, init_process_group
    from megatron.ft_trainer.launcher import launch_from

    case = CASES[given.case]
    flags = f"{runs.BASE} {TINY} {case.flags} --seed {1234 + given.seed} --data-path {os.environ[_FOLDER]}/corpus"
    init_process_group(parse(flags).core, launch_from(os.environ))
    job = assemble(case, flags)
    found = trials(job, case, way_of(job, case), given.flips, given.seed, given.stop_after)
    if dist.get_rank() == 0:
        result = {"case": given.case, "world": case.world, "way": case.way, **found}
        (given.into / f"storage-{given.case}-{given.seed}.json").write_text(json.dumps(result) + "\n")
        print(given.case, Counter(flip["outcome"] for flip in found["flips"]), found["alarms"], flush=True)
    destroy()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
