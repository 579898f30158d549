"""Hot-swap end to end: `ft run` with faults, against the same training without any."""

import os
import signal
import tomllib
from pathlib import Path

import pytest
from ft_runs import Finished, Running, flags, ft_run

ZERO = "--use-distributed-optimizer"
LAYOUTS = tomllib.loads(Path(__file__).with_name("hot_swap.toml").read_text())
PHASES = ("forward", "backward", "reduce", "optimizer", "transfer", "save", "evaluate")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * ("every_time" not in LAYOUTS[name])) for name in LAYOUTS]
)
def test_losses_after_faults_in_every_phase_are_those_without(name, corpus, reference, tmp_path):
    nproc, layout = LAYOUTS[name]["ranks"], LAYOUTS[name]["flags"]
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
    layout, steps = LAYOUTS["tp1 pp2 dp2"]["flags"], 160
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
