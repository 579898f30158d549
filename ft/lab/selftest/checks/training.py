"""Checks of whole runs: ``ft run`` trains a small GPT with hot-swap, without a fault and with one of each kind.

Two workers train and one stands by. With fewer than three GPUs the three workers share GPUs: each has an agent of its
own, as if it were alone on a node, because a worker's GPU is its number on its node.
"""

import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from ft.base import events
from ft.base.checkout import CHECKOUT
from ft.lab.selftest.ranks import devices, shared_gpu
from ft.lab.selftest.table import Context, Failed, Measured, Skipped
from ft.platform.network import free_port
from ft.platform.supervisor import command
from ft.record.recoveries import REPLACED, Recovery, recoveries
from ft.record.run import FINISHED, Run, load
from ft.show.text import seconds

_STEPS, _AT, _VICTIM, _WORKERS = 14, 6, 1, 2
_SHARED = range(1, _WORKERS + 1)
"""Numbers of GPUs that two workers and a standby have to share."""
_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8"
)
_ON_GPU = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2 "
    "--global-batch-size 16 --bf16"
)
_MODEL = (
    f"--train-iters {_STEPS} --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 2000 "
    "--position-embedding-type rope --eval-iters 0 --log-interval 1 --num-workers 0 --use-distributed-optimizer "
    "--reference-trainer --deterministic-mode --ft-hot-swap"
)
_ENDING_S = 10.0
_POLL_S = 0.1
_NOT_OF_THIS_JOB = ("SLURM_", "OMPI_", "PMI", "FT_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
_NOT_REPLACED = "read what ft report and the logs say of the recovery; ft run needs a standby, --standby 1"
_DIFFERENT = (
    "the state after the recovery is not the one before the fault: run the check reproducible, then snapshot, and "
    "report this with the logs"
)


class _Kind(NamedTuple):
    """A fault: its kind for ``--inject``, and what happens to the worker."""

    name: str
    what: str


def without_fault(context: Context) -> tuple[str, Measured]:
    """Train without a fault; the folder of the run stays for the other checks."""
    inject = ["--inject", f"exception@step={_AT}:rank={_VICTIM}:error=user"] if context.planted else []
    run = _train(context, _reference(context), inject)
    step_s = sorted(float(step["step_time_s"]) for step in run.metrics[1:] if "step_time_s" in step)
    measured: Measured = {"steps": len(run.metrics), "last_loss": run.metrics[-1]["loss"]}
    if step_s:
        measured["step_s"] = step_s[len(step_s) // 2]
    said = f"{len(run.metrics)} steps on {_WORKERS} workers"
    return f"{said}, loss {run.metrics[0]['loss']:.4f} to {run.metrics[-1]['loss']:.4f} ({_how(context)})", measured


def kill(context: Context) -> tuple[str, Measured]:
    """Recover from SIGKILL."""
    return _recover(context, _Kind("kill", "SIGKILL"))


def stop(context: Context) -> tuple[str, Measured]:
    """Recover from SIGSTOP."""
    return _recover(context, _Kind("hang", "SIGSTOP"))


def stall(context: Context) -> tuple[str, Measured]:
    """Recover from a training thread that hangs."""
    return _recover(context, _Kind("stall", "a hung training thread"))


def _recover(context: Context, kind: _Kind) -> tuple[str, Measured]:
    """Train with a fault, and compare the losses with those of the run without."""
    reference = _reference(context)
    if not reference.exists():
        _train(context, reference, [])
    expected = _losses(load(reference))
    if len(expected) != _STEPS:
        raise Skipped("there are no losses to compare with: the run without a fault has failed")
    faults = f"{kind.name}@step={_AT}:rank={_VICTIM}"
    if context.planted:
        faults += f",kill@step={_AT + 3}:rank={_VICTIM}"
    run = _train(context, context.scratch / "run", ["--inject", faults])
    found = recoveries(run.events)
    outcomes = [one.outcome for one in found]
    measured = _measured(found)
    if outcomes != [REPLACED]:
        said = ", ".join(outcomes) or "no recovery at all"
        raise Failed(f"instead of one replaced worker: {said}", _NOT_REPLACED, measured)
    if _losses(run) != expected:
        step = next(i for i, (a, b) in enumerate(zip(_losses(run), expected, strict=True), 1) if a != b)
        raise Failed(f"from step {step} on, losses differ from those of the run without a fault", _DIFFERENT, measured)
    noticed = f" (noticed in {seconds(found[0].phases['detect'])})" if "detect" in found[0].phases else ""
    said = f"replaced in {seconds(found[0].total)}{noticed} after {kind.what}"
    return f"{said}; losses equal, bit for bit", measured


def _measured(found: list[Recovery]) -> Measured:
    if not found:
        return {}
    return {"recovery_s": found[0].total, **{f"{name}_s": value for name, value in found[0].phases.items()}}


def _reference(context: Context) -> Path:
    """Return the folder of the run without a fault, next to the folders of the checks."""
    return context.scratch.parent / "reference"


def _losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.metrics]


def _how(context: Context) -> str:
    gpus = devices(context)
    if not gpus:
        return "no GPU: gloo"
    return "on shared GPUs, NCCL over sockets" if gpus in _SHARED else "one GPU each, NCCL"


def _train(context: Context, folder: Path, inject: list[str]) -> Run:
    """Train in ``folder`` and return the record of the run.

    Raises:
        Failed: the run has not come to its end.
    """
    gpus = devices(context)
    model = [*(_ON_GPU if gpus else _SMALL).split(), *_MODEL.split()]
    folder.mkdir(parents=True)
    agents = []
    try:
        for number, flags in enumerate(_agents(gpus)):
            words = [
                "run",
                *flags,
                "--run-dir",
                str(folder),
                "--quiet",
                *inject,
                str(CHECKOUT / "pretrain_gpt.py"),
                *model,
            ]
            agents.append(_start(words, folder / f"agent-{number}.out", _environment(gpus, number)))
        codes = _wait(agents, 0.9 * context.limit_s)
    finally:
        for agent in agents:
            agent.kill()
    run = load(folder)
    if codes is None:
        raise Failed(
            f"training stood still at step {len(run.metrics)} of {_STEPS}",
            f"see {folder}: logs/ shows where each worker is",
        )
    if run.state != FINISHED or len(run.metrics) != _STEPS:
        stopped = run.last(events.STOPPED)
        why = stopped.detail.get("message", "") if stopped is not None else (folder / "agent-0.out").read_text()[-300:]
        raise Failed(f"the run {run.state} (exit code {codes[0]}): {why}", f"see the logs in {folder}")
    return run


def _agents(gpus: int) -> list[list[str]]:
    """Return the flags of the agents that together run the workers and one standby."""
    if gpus in _SHARED:
        number = _WORKERS + 1
        where = ["--nnodes", str(number), "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
        own = ["--standby-nodes", "1", "--nproc-per-node", "1"]
        return [[*where, *own, "--node-rank", str(node)] for node in range(number)]
    return [["--standalone", "--nproc-per-node", str(_WORKERS), "--standby", "1"]]


def _environment(gpus: int, number: int) -> dict[str, str]:
    """Return the environment of an agent: without the job that the self-test itself is part of."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OF_THIS_JOB)}
    if gpus not in _SHARED:
        return own
    return {**own, **shared_gpu(number), "CUDA_VISIBLE_DEVICES": _visible(number % gpus)}


def _visible(number: int) -> str:
    """Return the name of GPU ``number`` of those that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[number].strip() if given else str(number)


def _start(words: list[str], out: Path, environment: dict[str, str]) -> subprocess.Popen:
    line = command("ft.cli", words, os.getpid(), ignores_signals=False)
    with open(out, "ab") as file:
        return subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=CHECKOUT,
            start_new_session=True,
        )


def _wait(agents: list[subprocess.Popen], limit_s: float) -> list[int] | None:
    """Return the agents' exit codes, None if the first one has not ended within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while agents[0].poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if agents[0].poll() is None:
        return None
    deadline = time.monotonic() + _ENDING_S
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [-1 if agent.poll() is None else agent.returncode for agent in agents]
