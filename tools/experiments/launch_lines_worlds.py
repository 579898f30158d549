"""Trains worlds of forked ranks, one after the other, from a process that has imported a trainer once.

    python tools/experiments/launch_lines_worlds.py SCRIPT < REQUESTS

SCRIPT is this project's ``pretrain_gpt.py``, or that of a Megatron-LM checkout. A request is one JSON line with
``flags``, ``ranks``, ``folder`` (where ``rank*.log`` and ``steps.jsonl`` are written), ``environment`` and ``limit_s``.
The answer is one JSON line with ``code``, the exit code of the first rank that failed (0: none, 124: out of time), and
``seconds``.
"""

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

STEPS = "steps.jsonl"
OUT_OF_TIME = 124


def main() -> int:
    script = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    is_ours = Path(script).resolve() == ROOT / "pretrain_gpt.py"
    import_trainer(script, is_ours)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        since = time.monotonic()
        code = world(script, is_ours, request)
        print(json.dumps({"code": code, "seconds": round(time.monotonic() - since, 2)}), file=answers)
    return 0


def import_trainer(script: str, is_ours: bool) -> None:
    """Import all that a rank needs; a forked rank inherits it."""
    import importlib
    import pkgutil

    if is_ours:
        from megatron import patches

        patches.apply()
        training = importlib.import_module("megatron.ft_trainer")
        for module in pkgutil.walk_packages(training.__path__, "megatron.ft_trainer."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    else:
        from ft.adapters.megatron_lm.start import load

        load(script)
    importlib.import_module("torch._dynamo")  # every optimizer step imports it
    importlib.import_module("megatron.core.datasets.gpt_dataset")


def world(script: str, is_ours: bool, request: dict) -> int:
    """Fork the ranks of a request, and wait for them; end all as soon as one fails or the time is up."""
    port = free_port()
    left, started = {}, []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(script, is_ours, request, rank, port)
        left[pid] = rank
        started.append(pid)
    deadline, code = time.monotonic() + request["limit_s"], 0
    while left and code == 0:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.pop(pid)
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            code = OUT_OF_TIME
        else:
            time.sleep(0.02)
    for pid in started:  # also ends what a rank leaves behind, such as the helpers of its checkpoints
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)
    return code


def free_port() -> int:
    """Return a free port below those that the kernel gives to connections, so that nobody takes it by chance."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.randrange(20000, 32000)))
            except OSError:
                continue
            return port


def _become_rank(script: str, is_ours: bool, request: dict, rank: int, port: int) -> None:
    code = 1
    try:
        from ft.platform import processes

        os.setpgid(0, 0)
        processes.die_with_parent(signal.SIGKILL)
        folder = Path(request["folder"])
        out = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ranks = str(request["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **request["environment"]}
        code = _train(script, is_ours, request["flags"], folder / STEPS, is_last=rank == request["ranks"] - 1)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(script: str, is_ours: bool, flags: list[str], steps: Path, *, is_last: bool) -> int:
    from ft.job.agent.script import run

    if is_ours:
        return run(script, False, [*flags, "--metrics-file", str(steps)])
    if is_last:
        from plain_megatron_lm import record

        record(steps)
    return run(script, False, flags)


if __name__ == "__main__":
    sys.exit(main())
