"""Ends a Slurm job after an ``ft run``, if the job's batch script has died with its node.

With ``--no-kill``, the job step and the run continue without that node. When the run is over, no process is left that
would end the job, and Slurm would keep the other nodes allocated until the job's time limit (seen with Slurm 22.05).
"""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

from ft.platform.slurm import hosts
from ft.platform.supervisor import END_SIGNALS

_POLL_S, _COMMAND_S, _ANSWER_S = 2.0, 30.0, 5.0


def end_orphaned_job(
    environment: Mapping[str, str], is_first_lost: bool, say: Callable[[str], None], patience_s: float = 1200.0
) -> None:
    """After the end of the run, end the Slurm job if its batch script is gone; otherwise return at once.

    Slurm has to confirm that the script's node is down, which it does only after its SlurmdTimeout (usually 300 s).

    Args:
        environment: environment variables.
        is_first_lost: whether the run has lost the first node of the allocation, which runs the batch script.
        say: function that prints a message.
        patience_s: maximum wait for Slurm's confirmation, in seconds.
    """
    job, launcher = job_name(environment), environment.get("SLURM_SRUN_COMM_HOST")
    if job is None or launcher is None or not is_first_lost:
        return
    if _answers(launcher, environment.get("SLURM_SRUN_COMM_PORT", "")):
        return
    say(f"the node of Slurm job {job}'s script is gone: the job is ended as soon as Slurm has noticed it")
    for signum in END_SIGNALS:  # there is nothing to save any more
        signal.signal(signum, signal.SIG_DFL)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = _show(job)
        if not is_under_way(found):
            return
        if is_orphan(found):
            _call("scancel", job)
            return
        time.sleep(_POLL_S)


def job_name(environment: Mapping[str, str]) -> str | None:
    """Return the id of this Slurm job, None outside Slurm.

    For array jobs it is ARRAYID_TASKID: SLURM_JOB_ID of one task is also the id of the whole array.
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environment.get("SLURM_JOB_ID")


def lost_first_node(status: Mapping) -> bool:
    """Return whether the run has lost node 0, the first of the allocation, where Slurm runs the batch script.

    ``status`` is the content of the run's status file, which maps each node to its state.
    """
    nodes = status.get("nodes")
    state = nodes.get("n0", "up") if isinstance(nodes, dict) else "up"
    return state != "up" and not str(state).startswith("suspect")


def is_under_way(job: Mapping[str, str]) -> bool:
    """Return whether ``job`` (the fields of ``scontrol show job``) is a running job with a batch script."""
    return job.get("JobState") == "RUNNING" and job.get("BatchFlag") == "1"


def is_orphan(job: Mapping[str, str]) -> bool:
    """Return whether Slurm has taken the batch script's node out of the job."""
    return "BatchHost" in job and job["BatchHost"] not in hosts(job.get("NodeList", ""))


def _show(job: str) -> dict[str, str]:
    words = _call("scontrol", "--oneliner", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _call(*command: str) -> str:
    """Return the output of a Slurm command, "" if Slurm is not installed or the command fails (no such job)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _answers(host: str, port: str) -> bool:
    """Return whether srun still listens at ``host:port``.

    Call it only once: srun logs each such connection in the job's output.
    """
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True
