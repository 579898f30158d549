"""Does DMR find every flipped bit, and nothing where no bit was flipped?

    python tools/experiments/dmr_detection.py --case NAME --flips 500 --into FOLDER    flip bits in one kind of run
    python tools/experiments/dmr_detection.py --clean NAME --steps 1000 --into FOLDER  train without flips
    python tools/experiments/dmr_detection.py --report --into FOLDER                   write the table of all results

A run trains a tiny model of megatron-core on one or more CPU processes. For each flip, one iteration is computed from
the same state: one bit of one element of one result (or of a tensor received from another rank) is changed, DMR
compares, and the state is restored. An iteration without a flip lists all results beforehand. Flips then take turns
between operators, phases and executions, so that rare ones are hit as often as frequent ones. Runs with a plan are
profiled and planned first; their second executions in windows are hit, too.

Outcomes of a flip:

- found: DMR reports a mismatch on all ranks, and the rank that was hit names the operator.
- error: DMR found the flip, and the iteration ended with an exception (such as an index that is out of range now).
- ended: the iteration ended with an exception before DMR compared.
- masked: not found, and loss, parameters and optimizer state are the same as without the flip.
- missed: not found, and training would continue with a wrong state.

If one of several ranks ends with an exception, the experiment ends with the results so far.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dmr_detection_lab import PLAN, Case, Lab, flips_of

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(Path(__file__).parent)]

_FOLDER = "DETECTION_FOLDER"
TINY = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
TINY += "--global-batch-size 2 --train-iters 1000000 --log-interval 1000000 "
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
SELECTIVE = "--recompute-granularity selective "
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 1 "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear "
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall "
PP2, TP2, CP2 = (f"--{kind}-parallel-size 2 " for kind in ("pipeline-model", "tensor-model", "context"))
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
INTERLEAVED = PP2 + "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4 "

CASES = {
    "naive-fp32": Case(1, "naive", DROPOUT),
    "naive-bf16": Case(1, "naive", DROPOUT + LLAMA + "--bf16 "),
    "recomputed-fp32": Case(1, "piggyback", DROPOUT + FULL + LLAMA),
    "recomputed-bf16": Case(1, "piggyback", DROPOUT + FULL + "--bf16 "),
    "selective-bf16": Case(1, "piggyback", DROPOUT + SELECTIVE + "--bf16 --clip-grad 0.01 "),
    "sgd-fp32": Case(1, "piggyback", FULL + "--optimizer sgd --position-embedding-type learned_absolute "),
    "experts-fp32": Case(1, "piggyback", DROPOUT + FULL + EXPERTS),
    "experts-bf16": Case(1, "naive", DROPOUT + EXPERTS + "--swiglu --bf16 "),
    "pp2-fp32": Case(2, "piggyback", PP2 + DROPOUT + FULL),
    "pp2-interleaved-bf16": Case(2, "piggyback", INTERLEAVED + DROPOUT + FULL + "--bf16 "),
    "tp2-sequence-bf16": Case(2, "piggyback", TP2 + "--sequence-parallel " + DROPOUT + FULL + "--bf16 "),
    "tp2-bf16": Case(2, "piggyback", TP2 + DROPOUT + FULL + "--bf16 "),
    "dp2-fp32": Case(2, "naive", DROPOUT),
    "dp2-overlap-bf16": Case(2, "piggyback", OVERLAP + DROPOUT + FULL + "--bf16 "),
    "ep2-fp32": Case(2, "piggyback", OVERLAP + DROPOUT + EXPERTS + "--expert-model-parallel-size 2 "),
    "cp2-fp32": Case(2, "naive", CP2 + LLAMA),
    "cp2-recomputed-bf16": Case(2, "piggyback", CP2 + FULL + "--bf16 "),
    "tp2-cp2-distributed-bf16": Case(4, "piggyback", TP2 + CP2 + FULL + OVERLAP + "--sequence-parallel --bf16 "),
    "plan-pp2-fp32": Case(2, PLAN, PP2 + DROPOUT + FULL + "--global-batch-size 4 "),
    "plan-pp2-bf16": Case(2, PLAN, PP2 + DROPOUT + "--bf16 --global-batch-size 4 "),
    "plan-ep2-fp32": Case(2, PLAN, DROPOUT + EXPERTS + ALL_TO_ALL + "--expert-model-parallel-size 2 "),
}
CLEAN = {
    "plan-pp2-interleaved-bf16": Case(2, PLAN, INTERLEAVED + DROPOUT + FULL + OVERLAP + "--bf16 "),
    "plan-ep2-overlap-fp32": Case(
        2, PLAN, OVERLAP + DROPOUT + EXPERTS + ALL_TO_ALL + "--expert-model-parallel-size 2 "
    ),
    "pp2-interleaved-experts-bf16": Case(
        2, "piggyback", INTERLEAVED + DROPOUT + EXPERTS + "--bf16 --global-batch-size 2 " + OVERLAP
    ),
    "ep2-overlap-recomputed-fp32": Case(
        2, "piggyback", OVERLAP + DROPOUT + FULL + EXPERTS + "--expert-model-parallel-size 2 "
    ),
    "pp2-ep2-overlap-bf16": Case(
        4,
        "piggyback",
        OVERLAP + DROPOUT + EXPERTS + PP2 + "--expert-model-parallel-size 2 --bf16 --global-batch-size 4 ",
    ),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="flip bits in this kind of run")
    parser.add_argument("--flips", type=int, default=400, metavar="N")
    parser.add_argument(
        "--clean", choices=CLEAN, help="train like this without flips; another --seed: other data and weights"
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--stop-after", type=float, default=200.0, metavar="S", help="begin nothing after so long")
    parser.add_argument("--into", type=Path, required=True, help="folder for results, one JSON file each")
    parser.add_argument("--report", action="store_true", help="write the table from what is in --into")
    given = parser.parse_args(argv)
    if _FOLDER in os.environ:
        in_rank(given)
        return 0
    given.into.mkdir(parents=True, exist_ok=True)
    if given.case or given.clean:
        with tempfile.TemporaryDirectory() as folder:
            launch(given, argv, Path(folder))
    if given.report:
        from dmr_detection_report import write

        print(write(given.into, ROOT))
    return 0


def launch(given: argparse.Namespace, argv: list[str], folder: Path, script: str = __file__) -> None:
    """Run ``script`` in the ranks; rank 0 writes the result."""
    import small_runs as runs

    from megatron import patches

    patches.apply()
    runs.make_corpus(folder, documents=10)
    world = (CASES[given.case] if given.case else CLEAN[given.clean]).world
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, script, *argv], env=environment, check=True)


# --- in a rank -------------------------------------------------------------------------------------------------------


def in_rank(given: argparse.Namespace) -> None:
    import small_runs as runs
    import torch.distributed as dist

    from megatron.ft_trainer.arguments import parse
    from megatron.ft_trainer.initialize import destroy, init_process_group
    from megatron.ft_trainer.launcher import launch_from

    case = CASES[given.case] if given.case else CLEAN[given.clean]
    flags = f"{runs.BASE} {TINY} {case.flags} --seed {1234 + given.seed} --data-path {os.environ[_FOLDER]}/corpus"
    init_process_group(parse(flags).core, launch_from(os.environ))
    job = assemble(case, flags)
    if given.case:
        lab = Lab(job, way_of(job, case))
        result = {"case": given.case, **flips_of(lab, case, given.flips, given.seed, given.stop_after)}
    else:
        result = train(given, case, job)
    if dist.get_rank() == 0:
        name = f"flips-{given.case}-{given.seed}" if given.case else f"clean-{given.clean}-{given.seed}"
        (given.into / f"{name}.json").write_text(json.dumps(result) + "\n")
        print(name, {key: value for key, value in result.items() if key != "flips"}, flush=True)
    destroy()


def assemble(case: Case, flags: str):
    """Build the job of a case. Collective."""
    import dmr_jobs

    if case.divides_sequences:
        import planted_context

        planted_context.plant()
    return dmr_jobs.assemble(flags, has_te=case.divides_sequences)


def way_of(job, case: Case) -> str | Path:
    """Return the kind of DMR for ``job``. Collective."""
    import dmr_jobs

    return dmr_jobs.plan_of(job, Path(os.environ[_FOLDER])) if case.way == PLAN else case.way


def train(given: argparse.Namespace, case: Case, job) -> dict:
    """Train without faults; all mismatches that DMR reports are false alarms."""
    import dmr_jobs
    import torch.distributed as dist

    from megatron.ft_trainer.loop import train_step

    protection = dmr_jobs.protection(job, way_of(job, case))
    alarms: list[str] = []

    def mismatch(step, attempt, reports, outcome):
        alarms.append(
            f"step {step}, attempt {attempt}: {[str(one) for found in reports.values() for one in found][:3]}"
        )

    protection._witness.mismatch = mismatch
    began, done, losses, verified = time.monotonic(), 0, [], 0
    over = [False]
    while done < given.steps and not over[0]:
        losses.append(train_step(job).loss)
        verified += sum(protection.engine.coverage().values())
        done += 1
        over = [time.monotonic() - began > given.stop_after]
        dist.broadcast_object_list(over, src=0) if done % 20 == 0 else over.__setitem__(0, False)
    return {
        "case": given.clean,
        "world": case.world,
        "way": case.way,
        "flags": case.flags.split(),
        "steps": done,
        "alarms": alarms,
        "operators": verified,
        "coverage": protection.engine.coverage(),
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
