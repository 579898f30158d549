"""Hot-swap end to end: `ft run` with faults, against the same training without any."""

import os
import signal
from pathlib import Path

import pytest
from ft_runs import Finished, Running, flags, ft_run

ZERO = "--use-distributed-optimizer"
HOST = f"{ZERO} --bf16 --use-precision-aware-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d"
LAYOUTS = {
    "tp1 pp2 dp2": (4, f"{ZERO} --pipeline-model-parallel-size 2"),
    "tp2 pp1 dp2": (4, f"{ZERO} --tensor-model-parallel-size 2"),
    "tp2 pp2 dp2": (8, f"{ZERO} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "bf16": (4, f"{ZERO} --pipeline-model-parallel-size 2 --bf16"),
    "bf16, dropout, sequence parallel": (
        4,
        f"{ZERO} --tensor-model-parallel-size 2 --sequence-parallel --bf16 --hidden-dropout 0.1",
    ),
    "experts": (4, f"{ZERO} --num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"),
    "interleaved": (4, f"{ZERO} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "overlapped": (4, f"{ZERO} --overlap-grad-reduce --overlap-param-gather"),
    "replicated optimizer": (4, "--pipeline-model-parallel-size 2"),
    "optimizer on the host": (2, f"{HOST} --overlap-grad-reduce --overlap-param-gather"),
    "optimizer partly on the host": (4, f"{HOST} --pipeline-model-parallel-size 2 --optimizer-offload-fraction 0.5"),
    "no data parallelism": (4, f"{ZERO} --pipeline-model-parallel-size 4"),
}
PHASES = ("forward", "backward", "reduce", "optimizer", "transfer", "save", "evaluate")


EVERY_TIME = ("bf16, dropout, sequence parallel", "optimizer on the host")
"""Layouts of the default tier: what other tests of it do not have, in which stages and copies of float32 are usual."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERY_TIME)) for name in LAYOUTS]
)
def test_losses_after_faults_in_every_phase_are_those_without(name, corpus, reference, tmp_path):
    nproc, layout = LAYOUTS[name]
    steps = 4 + 4 * len(PHASES)
    extra = f"{layout} --eval-interval 4 --eval-iters 2"
    saving = f"{extra} --save {tmp_path}/save --save-interval 4"
    faults = ",".join(
        f"kill@step={4 * (i + 1)}:rank={(i + nproc // 2) % nproc}:phase={phase}" for i, phase in enumerate(PHASES)
    )
    done = ft_run(tmp_path / "run", flags(corpus, saving, steps), nproc=nproc, options=f"--inject {faults}")
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == len(PHASES), done.explain()
    assert not done.named("restarted") and not done.named("step_differs"), done.explain()
    assert done.losses == reference(nproc, extra, steps)


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_standby_that_ends_while_it_touches_memory_is_replaced_and_its_memory_freed(
    signum, corpus, reference, tmp_path
):
    layout, steps = LAYOUTS["tp1 pp2 dp2"][1], 80
    script = "tests/helpers/slow_standby_gpt.py"
    run = Running(tmp_path / "run", script, flags(corpus, layout, steps), nproc=2)
    run.wait_for(lambda: touches(run, "n0.w2"))
    os.kill(process_of(run, "n0.w2"), signum)
    run.wait_for(lambda: touches(run, "n0.w3"))
    assert not Path(f"/proc/{process_of(run, 'n0.w2')}").exists()
    os.kill(process_of(run, "n0.w1"), signal.SIGKILL)  # the standby has not touched all of its memory yet
    done = run.wait()
    assert done.code == 0 and done.losses == reference(2, layout, steps), done.explain()
    assert not done.named("restarted") and len(done.named("resumed")) == 2, done.explain()
    assert done.named("epoch_opened")[-1].detail["seats"]["1"] == "n0.w3"


def touches(run: Running, worker: str) -> bool:
    log = run.folder / "logs" / f"{worker}.log"
    return log.exists() and "kept ready for a logical rank" in log.read_text()


def process_of(run: Running, worker: str) -> int:
    started = Finished(0, "", run.folder).named("worker_started")
    return next(event.detail["pid"] for event in started if event.worker == worker)
