"""A run over MPI on three hosts, one of which loses its power: under srun, and under mpirun.

    python tools/experiments/mpi_hosts.py srun
    python tools/experiments/mpi_hosts.py mpirun

The hosts are network namespaces with a real Slurm (tests/helpers/slurm/cluster.py: needs root, slurm-wlm, munge;
libpmix-dev for srun). Two nodes train, the third carries standbys. The power of n2 is cut during the run: its agent,
its workers, its MPI process and the daemon of mpirun or Slurm are gone, and no packet announces it. The script prints
one JSON line: whether the run has finished, how often it was restarted, which worker holds which rank at the end, and
whether the losses are those of a run without faults.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import small_runs as runs  # noqa: E402
from slurm.cluster import Cluster  # noqa: E402

STEPS, LIMIT_S = 400, 120
LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
BIN = Path(sys.executable).parent


class Hosts(Cluster):
    """Three nodes with separate folders for PMIx, which names its folder after the job alone."""

    def _write_files(self) -> None:
        super()._write_files()
        (self.folder / "pmix").mkdir()
        (self.folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.folder}/pmix\n")

    def start_node(self, node: str) -> None:
        super().start_node(node)
        mount = ["mount", "-t", "tmpfs", "pmix", f"{self.folder}/pmix"]
        subprocess.run(["nsenter", f"--target={self.init(node)}", "--mount", *mount], check=True)

    def init(self, node: str) -> int:
        return self._child(self._processes[node])

    def remote_shell(self) -> Path:
        """Return the script with which mpirun starts its daemons, instead of ``ssh -f``: it returns at once."""
        cases = "".join(f"{node}) init={self.init(node)};;\n" for node in self.nodes)
        into = "--net --uts --mount --pid --ipc"
        script = self.folder / "remote"
        script.write_text(
            f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}esac\nmkdir -p {self.folder}/tmp.$host\n"
            f'export TMPDIR={self.folder}/tmp.$host\nsetsid nsenter --target=$init {into} sh -c "$*" '
            ">/dev/null 2>&1 </dev/null &\n"
        )
        script.chmod(0o755)
        return script

    def launch(self, words: list[str], log: Path) -> subprocess.Popen:
        path = f"{BIN}:{os.environ['PATH']}"
        more = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with open(log, "wb") as out:
            return subprocess.Popen(
                [*self._on_login(), *words],
                env=self._environment(more),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )


def main(how: str) -> int:
    with tempfile.TemporaryDirectory() as scratch, Hosts(3) as hosts:
        from megatron import patches

        patches.apply()
        folder = Path(scratch)
        flags = f"{runs.BASE} --train-iters {STEPS} --ft-hot-swap {LAYOUT} --data-path {runs.make_corpus(folder)}"
        script = ["pretrain_gpt.py", *flags.split()]
        reference = folder / "reference"
        command = [sys.executable, "-m", "ft", "run", "--quiet", "--nproc-per-node", "4", "--run-dir", str(reference)]
        subprocess.run([*command, *script], cwd=ROOT, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        run = folder / "run"
        command = [sys.executable, "-m", "ft", "run", "--standby-nodes", "1", "--nproc-per-node", "2"]
        command += ["--run-dir", str(run), "--ft-transport", "mpi", *script]
        job = hosts.launch([*launcher(how, hosts), *command], folder / "out")
        try:
            found = watch(hosts, job, run)
        finally:
            job.kill()
            job.wait()
        found["losses_as_without_fault"] = losses(run) == losses(reference)
        print(json.dumps({"launched_by": how, **found}))
        if not found["finished"]:
            print((folder / "out").read_text(errors="replace")[-6000:])
        return 0 if found["finished"] and found["losses_as_without_fault"] and not found["restarts"] else 1


def launcher(how: str, hosts: Hosts) -> list[str]:
    if how == "srun":
        return ["srun", "--nodes=3", "--ntasks-per-node=1", "--mpi=pmix", "--no-kill", "--kill-on-bad-exit=0"]
    start = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(hosts.remote_shell())]
    places = ["--host", ",".join(f"{node}:1" for node in hosts.nodes), "-n", "3", "--map-by", "ppr:1:node"]
    return ["mpirun", "--allow-run-as-root", "--with-ft", "ulfm", *start, *places]


def watch(hosts: Hosts, job: subprocess.Popen, run: Path) -> dict:
    deadline, cut = time.monotonic() + LIMIT_S, None
    while time.monotonic() < deadline and job.poll() is None and not events(run, "finished"):
        if cut is None and len(metrics(run)) >= 20 and len(events(run, "standby_ready")) >= 2:
            cut = len(metrics(run))
            hosts.cut_power("n2")
        time.sleep(0.05)
    try:
        code = job.wait(20)
    except subprocess.TimeoutExpired:
        code = None
    opened = events(run, "epoch_opened")
    return {
        "finished": bool(events(run, "finished")),
        "cut_after_step": cut,
        "restarts": len(events(run, "restarted")),
        "seats": opened[-1]["detail"]["seats"] if opened else None,
        "launchers_exit_code": code,
    }


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(run: Path, name: str) -> list[dict]:
    return [event for event in lines(run / "events.jsonl") if event["name"] == name]


def metrics(run: Path) -> list[dict]:
    return lines(run / "metrics.jsonl")


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in metrics(run)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
