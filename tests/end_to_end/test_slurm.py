"""`examples/slurm` on a real Slurm of several nodes (tests/helpers/slurm): nodes die, jobs are requeued, cancelled."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import replica_runs
import small_runs as runs
from ft_runs import ROOT, flags
from slurm.cluster import Cluster, reason_to_skip
from small_disks import fill, make_room, small_disk

from ft.base import events
from ft.job.replicas.places import parts_of
from ft.platform import election
from megatron.ft_trainer.arguments import check, parse

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"
STEPS = 80
START_S, END_S = 300.0, 300.0


@pytest.fixture
def cluster(request):
    if reason := reason_to_skip():
        pytest.skip(reason)
    with Cluster(request.param) as made:
        yield made
    assert not list(made.folder.parent.glob(f"{made.folder.name}*"))
    left = [name for name in os.listdir("/proc") if name.isdigit() and str(made.folder) in environment_of(name)]
    assert not left, f"left behind: {left}"


@pytest.fixture
def disk(tmp_path):
    """The folder of the runs: a file system of 12 MiB, which all nodes see."""
    with small_disk(tmp_path / "runs", "12m") as folder:
        yield folder


class Job:
    """The example as a job: 2 workers on each node, a tiny model; the file itself is as it is."""

    def __init__(
        self,
        cluster: Cluster,
        tmp_path: Path,
        corpus: str,
        example: str,
        *options: str,
        standby_nodes: int = 0,
        model: str = "",
        **settings: str,
    ):
        self.cluster, self.folder = cluster, tmp_path / "runs"
        self._output = tmp_path / "job.out"
        command = tmp_path / "bin" / "ft"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ft "$@"\n')
        command.chmod(0o755)
        environment = {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "FOLDER": str(self.folder),
            "WORKERS_PER_NODE": "2",
            "STANDBY_NODES": str(standby_nodes),
            **settings,
        }
        self._environment, self._model = environment, (model or flags(corpus, LAYOUT, STEPS)).split()
        script = str(ROOT / "examples" / "slurm" / example)
        sbatch = ["sbatch", "--parsable", f"--nodes={len(cluster.nodes)}", f"--output={self._output}"]
        self.number = cluster.command(*sbatch, *options, script, *self._model, environment=environment, cwd=ROOT)

    def bring(self, replica: int, replicas: int) -> None:
        """Another job of one node brings a replica of this one, with the same flags."""
        own = f"ft run --nproc-per-node 1 --ft-hsdp-replicas {replicas} --ft-hsdp-replica {replica}"
        command = f"srun {own} --run-dir {self.run()} pretrain_gpt.py {' '.join(self._model)}"
        sbatch = ["sbatch", "--nodes=1", f"--output={self._output}.{replica}", f"--wrap={command}"]
        self.cluster.command(*sbatch, environment=self._environment, cwd=ROOT)

    def state(self, task: str = "") -> str:
        """Of this job, or of one of its array."""
        return self.cluster.command(
            "squeue", "--noheader", "--states=all", f"--job={self.number}{task}", "--Format=State"
        )

    def run(self, restart: int = 0) -> Path:
        found = sorted(self.folder.glob(f"*-{restart}"))
        return found[0] if found else self.folder / "none"

    def steps(self, restart: int = 0) -> list[dict]:
        path = self.run(restart) / "metrics.jsonl"
        try:
            return runs.metrics(path)
        except (OSError, ValueError):  # not there yet, or in the middle of a line
            return []

    def wait_for_step(self, step: int, restart: int = 0) -> None:
        self.wait_for(lambda: (self.steps(restart) or [{"step": 0}])[-1]["step"] >= step, START_S, f"step {step}")

    def wait_for_state(self, *states: str) -> dict[str, str]:
        self.wait_for(lambda: self.cluster.job(self.number)["JobState"] in states, END_S, f"job {' or '.join(states)}")
        return self.cluster.job(self.number)

    def wait_for(self, true, limit_s: float, what: str) -> None:
        try:
            self.cluster.wait_for(true, limit_s, what)
        except AssertionError as error:
            self._have_stacks_written()
            raise AssertionError(f"{error}\n{self.explain()}") from None

    def _have_stacks_written(self) -> None:
        """Workers write into their logs where each of their threads is."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                log = Path(os.readlink(f"/proc/{name}/fd/1"))
                if log.parent.name == "logs" and log.is_relative_to(self.folder) and ".w" in log.name:
                    os.kill(int(name), signal.SIGUSR1)
        time.sleep(0.5)

    def events(self, name: str, restart: int = 0) -> list:
        return [event for event in events.read(self.run(restart) / "events.jsonl") if event.name == name]

    def healthy(self) -> tuple[int, ...] | None:
        """Return the replicas that have trained the newest step; None before step 5."""
        found = replica_runs.proof(self.run()).lineage.steps if self.run().exists() else []
        return found[-1].commit.healthy if found and found[-1].number >= 5 else None

    def explain(self) -> str:
        files = [self._output, *sorted(self.folder.glob("*/slurm/*")), *sorted(self.folder.glob("*/logs/*"))]
        return "".join(f"--- {file.name}\n{file.read_text()[-3000:]}\n" for file in files if file.is_file())


def agents_on(node: str) -> list[int]:
    """Return the pids of the ``ft run`` of a node: the leaders of Slurm's tasks there."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        words = environment_of(pid).split("\0")
        if f"SLURMD_NODENAME={node}" in words and "SLURM_LOCALID=0" in words:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                found += [int(pid)] if command[1:4] == [b"-m", b"ft", b"run"] else []
    return found


def environment_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def losses(*parts: list[dict]) -> list[float]:
    found = [step for part in parts for step in part]
    assert [step["step"] for step in found] == list(range(1, len(found) + 1)), "a step is missing or there twice"
    return [step["loss"] for step in found]


@pytest.mark.long
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_standby_nodes_take_the_places_of_one_without_power_and_one_set_down(cluster, corpus, reference, tmp_path):
    job = Job(cluster, tmp_path, corpus, "hot_swap.sbatch", standby_nodes=2)
    job.wait_for_step(5)
    cluster.cut_power("n2")
    job.wait_for(lambda: len(job.events(events.RESUMED)) >= 2, START_S, "the first recovery")
    holders = {seat.split(".")[0] for seat in job.events(events.EPOCH_OPENED)[-1].detail["seats"].values()}
    host = cluster.nodes[int(min(holders - {"n0"})[1])]  # the run counts its nodes from 0
    cluster.command("scontrol", "update", f"nodename={host}", "state=down", "reason=test")
    done = job.wait_for_state("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert done["JobState"] == "COMPLETED", job.explain()
    assert not job.events(events.RESTARTED), job.explain()
    assert len(job.events(events.RESUMED)) >= 3, job.explain()
    assert losses(job.steps()) == reference(4, LAYOUT, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_full_file_system_ends_no_agent_and_a_lost_node_is_replaced_on_it(disk, cluster, corpus, reference, tmp_path):
    steps, elsewhere = 120, tmp_path / "metrics.jsonl"  # of all files of the run, only this one is on another disk
    model = flags(corpus, f"{LAYOUT} --log-interval 1 --metrics-file {elsewhere}", steps)
    job = Job(cluster, tmp_path, corpus, "hot_swap.sbatch", standby_nodes=1, model=model)

    def last_step() -> int:
        return len(elsewhere.read_text().splitlines()) if elsewhere.exists() else 0

    job.wait_for(lambda: last_step() >= 5, START_S, "step 5")
    fill(disk, files=False)
    (agent,) = agents_on("n1")
    os.kill(agent, signal.SIGKILL)  # and with it the control plane
    job.wait_for(lambda: election.read(job.run()).term > 0, START_S, "another node's control plane")
    before = last_step()
    job.wait_for(lambda: last_step() >= before + 25, START_S, "more output than a page has room for")
    make_room(disk)
    done = job.wait_for_state("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert done["JobState"] == "COMPLETED", job.explain()
    assert not job.events(events.RESTARTED), job.explain()
    assert losses(runs.metrics(elsewhere)) == reference(4, LAYOUT, steps)
    printed = "".join((job.run() / "slurm" / f"{node}.out").read_text() for node in ("n2", "n3"))
    assert "of output could not be written here (No space left on device)" in printed


@pytest.mark.long
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_minute_of_suspension_costs_nothing_but_the_minute(cluster, corpus, reference, tmp_path):
    job = Job(cluster, tmp_path, corpus, "hot_swap.sbatch", standby_nodes=1)
    job.wait_for_step(5)
    cluster.command("scontrol", "suspend", job.number)
    assert job.wait_for_state("SUSPENDED", "COMPLETED")["JobState"] == "SUSPENDED", job.explain()
    time.sleep(60)
    cluster.command("scontrol", "resume", job.number)
    done = job.wait_for_state("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert done["JobState"] == "COMPLETED", job.explain()
    for name in (events.FAULT_DETECTED, events.WORKER_LOST, events.EPOCH_CLOSED, events.RESTARTED):
        assert not job.events(name), job.explain()
    assert losses(job.steps()) == reference(4, LAYOUT, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_a_job_put_back_into_the_queue_goes_on_and_a_cancelled_one_saves(cluster, corpus, reference, tmp_path):
    here = ("--partition=all", "--cpus-per-task=4", "--gpus-per-node=8")
    job = Job(cluster, tmp_path, corpus, "hot_swap_cluster.sbatch", *here, standby_nodes=1)
    job.wait_for_step(5)
    cluster.command("scontrol", "requeue", job.number)
    job.wait_for_step(len(job.steps()) + 5, restart=1)
    cluster.command("scancel", job.number)
    assert job.wait_for_state("CANCELLED")["Restarts"] == "1"
    found = losses(job.steps(), job.steps(1))
    assert found == reference(4, LAYOUT, STEPS)[: len(found)], job.explain()
    saved = (job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()
    assert saved == str(len(found)), job.explain()
    job.wait_for(lambda: not [name for node in cluster.nodes for name in cluster.processes(node)], 20, "empty nodes")


@pytest.mark.parametrize("cluster", [3], indirect=True)
def test_the_first_node_with_script_and_control_plane_is_a_node_like_any_other(cluster, corpus, reference, tmp_path):
    job = Job(cluster, tmp_path, corpus, "hot_swap.sbatch", "--array=7,8%1", standby_nodes=1)
    job.wait_for_step(5)
    cluster.cut_power("n1")
    job.wait_for(
        lambda: job.state("_7") == "CANCELLED", END_S, "the nodes that are left end the job, with the run over"
    )
    assert not job.events(events.RESTARTED), job.explain()
    assert job.events(events.FINISHED), job.explain()
    assert losses(job.steps()) == reference(4, LAYOUT, STEPS)
    assert job.state("_8") == "PENDING", "the array's next job waits for a third node"


@pytest.mark.long
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_replicas_go_on_without_a_node_s_power_and_another_job_brings_its_replica_back(cluster, corpus, tmp_path):
    steps = 600
    model = replica_runs.flags(corpus, steps=steps)
    settings = {"REPLICAS": "3", "WORKERS_PER_NODE": "1", "FT_HSDP_DIGESTS": "1"}
    job = Job(cluster, tmp_path, corpus, "hsdp.sbatch", "--nodes=3", model=model, **settings)

    job.wait_for(lambda: job.healthy() is not None, START_S, "step 5")
    cluster.cut_power("n2")
    job.wait_for(lambda: job.healthy() == (0, 2), START_S, "steps of the two others")
    job.bring(1, 3)
    job.wait_for(lambda: job.healthy() == (0, 1, 2), START_S, "the third one's return")
    done = job.wait_for_state("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    found = replica_runs.proof(job.run()).problems(steps, 1)
    assert done["JobState"] == "COMPLETED" and not found, f"{found}\n{job.explain()}"


@pytest.mark.long
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_standby_node_brings_back_the_replica_of_a_node_without_power(cluster, corpus, tmp_path):
    """Three replicas of one node; the standby node is a part of replica 0, and replica 2 is lost."""
    steps = 600
    model = replica_runs.flags(corpus, "--use-distributed-optimizer", steps)
    job = Job(cluster, tmp_path, corpus, "hsdp.sbatch", standby_nodes=1, model=model, REPLICAS="3", FT_HSDP_DIGESTS="1")

    job.wait_for(lambda: job.healthy() is not None, START_S, "step 5")
    cluster.cut_power("n3")
    job.wait_for(lambda: job.healthy() == (0, 1), START_S, "steps of the two others")
    job.wait_for(lambda: job.healthy() == (0, 1, 2), START_S, "the return of the third one")
    done = job.wait_for_state("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    found = replica_runs.proof(job.run()).problems(steps, 1)
    assert done["JobState"] == "COMPLETED" and not found, f"{found}\n{job.explain()}"
    assert "takes the place of node 2, in replica 2" in job.explain()


@pytest.mark.long
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_job_that_usr1_ends_early_saves_and_is_queued_again_until_all_steps_are_done(
    cluster, corpus, reference, tmp_path
):
    job = Job(cluster, tmp_path, corpus, "hot_swap.sbatch")
    job.wait_for_step(5)
    cluster.command("scancel", "--signal=USR1", job.number)
    job.wait_for_step(STEPS, restart=1)
    done = job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")
    assert done["JobState"] == "COMPLETED" and done["Restarts"] == "1", job.explain()
    (end,) = job.events(events.FINISHED)
    assert end.detail["early"] == "SIGTERM" and end.step == len(job.steps()) < STEPS, job.explain()
    assert not job.events(events.WORKER_LOST) and not job.events(events.RESTARTED), job.explain()
    assert losses(job.steps(), job.steps(1)) == reference(4, LAYOUT, STEPS)


def test_the_examples_of_hot_swap_end_alike():
    names = ("hot_swap.sbatch", "hot_swap_cluster.sbatch")
    ends = {(ROOT / "examples" / "slurm" / name).read_text().partition("|| code=$?\n")[2] for name in names}
    assert len(ends) == 1 and "scontrol requeue" in ends.pop()


@pytest.mark.parametrize("example", ["hot_swap.sbatch", "hsdp.sbatch"])
@pytest.mark.parametrize(
    ("srun", "ended", "array", "code", "called"),
    [
        (0, "", "", 0, []),
        (0, "", "5", 0, ["scancel --state=PENDING 5"]),
        (143, "finished", "5", 0, ["scancel --state=PENDING 5"]),
        (143, "ended early (SIGTERM) at 219 of 300", "", 75, ["scontrol requeue 7"]),
        (143, "ended early (SIGTERM) at 219 of 300", "5", 75, []),
        (74, "finished, not saved", "5", 74, []),
        (75, "ended early (SIGTERM) at 219 of 300, not saved", "", 74, []),
        (1, "stopped with code 1", "", 1, []),
    ],
)
def test_an_example_ends_as_the_run_s_record_says(example, srun, ended, array, code, called, tmp_path):
    marks = tmp_path / "7-0" / "ended"
    marks.mkdir(parents=True)
    if not ended.startswith("stopped"):
        (marks / "0").write_text(ended)
    log = tmp_path / "called"
    log.touch()
    commands = {
        "srun": f"exit {srun}",
        "ft": f"echo 'run        DIR'; echo 'state      {ended}, ended 3 s ago'",
        "scontrol": f'echo "scontrol $*" >> {log}',
        "scancel": f'echo "scancel $*" >> {log}',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NAME": "gpt"} | ({"SLURM_ARRAY_JOB_ID": array} if array else {})
    script = ["bash", str(ROOT / "examples" / "slurm" / example)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, log.read_text().splitlines()) == (code, called), done.stderr


def told_to_srun(example: str, tmp_path: Path) -> list[str]:
    """The words that the example gives to srun."""
    shown = tmp_path / "bin" / "srun"
    shown.parent.mkdir()
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    environment = {"PATH": f"{shown.parent}:{os.environ['PATH']}", "FOLDER": str(tmp_path), "SLURM_JOB_ID": "7"}
    script = ["bash", str(ROOT / "examples" / "slurm" / example)]
    done = subprocess.run(
        script, env={**environment, "SLURM_JOB_NAME": "gpt"}, capture_output=True, text=True, timeout=180, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("example", "world_size"), [("hot_swap.sbatch", 64), ("hot_swap_cluster.sbatch", 256)])
def test_the_examples_models_fit_their_nodes(example, world_size, tmp_path):
    words = told_to_srun(example, tmp_path)
    options = parse(words[words.index("pretrain_gpt.py") + 1 :])
    check(options, world_size, has_te=True)
    nodes, standbys, workers = (
        int(re.search(rf"--{name}[= ](\d+)", text)[1])
        for name, text in (
            ("nodes", (ROOT / "examples" / "slurm" / example).read_text()),
            ("standby-nodes", " ".join(words)),
            ("nproc-per-node", " ".join(words)),
        )
    )
    assert (nodes - standbys) * workers == world_size


def test_the_example_of_replicas_gives_each_a_set_of_nodes_that_its_model_fits(tmp_path):
    words = told_to_srun("hsdp.sbatch", tmp_path)
    nodes = int(re.search(r"--nodes=(\d+)", (ROOT / "examples" / "slurm" / "hsdp.sbatch").read_text())[1])
    given = {name: int(words[words.index(f"--{name}") + 1]) for name in ("nproc-per-node", "ft-hsdp-replicas")}
    parts = [part for node in range(nodes) for part in parts_of(node, nodes, *given.values())]
    assert len(parts) == nodes and not any(part.shared for part in parts)
    check(parse(words[words.index("pretrain_gpt.py") + 1 :]), parts[0].world_size, has_te=True)
