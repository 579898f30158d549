"""Open MPI's behaviour on this machine when processes die, stop or start late, on which --ft-transport mpi relies.

    python tools/experiments/mpi_facts.py

Each printed line is a question, the answer found here, and whether ft/net/streams.py and mpi_relay.py rely on it.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DETECTOR = {"OMPI_MCA_mpi_ft_detector": "1", "OMPI_MCA_mpi_ft_detector_period": "0.5"}
DETECTOR |= {"OMPI_MCA_mpi_ft_detector_timeout": "2"}
THREAD = {**DETECTOR, "OMPI_MCA_mpi_ft_detector_thread": "1"}
LIMIT_S = 12


def main() -> int:
    facts = [
        ("a process is killed: do the others hear of it?", "kill", {}, "yes"),
        ("... exits with status 3, without MPI_Finalize?", "exit", {}, "no"),
        ("... is stopped (SIGSTOP)?", "stop", {}, "no"),
        ("... is stopped, with the heartbeat detector?", "stop", DETECTOR, "yes"),
        ("is a stopped one that was declared dead let go on?", "wake", DETECTOR, "no"),
        ("does MPIX_Comm_ishrink work on a revoked communicator?", "ishrink", {}, "no"),
        ("do all get through MPI_Finalize with the detector?", "finalize", DETECTOR, "yes"),
        ("... with the detector's thread?", "finalize", THREAD, "no"),
        ("can processes that mpirun has not started connect?", "connect", {"alone": "1"}, "no"),
    ]
    as_expected = True
    for question, what, settings, expected in facts:
        answer, detail = ask(what, settings)
        as_expected &= answer == expected
        remark = "" if answer == expected else "   <- the design expects otherwise"
        print(f"{question:60} {answer:4} {detail}{remark}", flush=True)
    return 0 if as_expected else 1


def ask(what: str, settings: dict[str, str]) -> tuple[str, str]:
    """Return ("yes" or "no", details), read from the last line of the process that knows the answer."""
    with tempfile.TemporaryDirectory() as folder:
        me = [sys.executable, __file__, what, folder]
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        under = [mpirun, *root, "--oversubscribe", "--with-ft", "ulfm", "-n", "3", *me]
        start = [me, me] if settings.get("alone") else [under]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        jobs = [subprocess.Popen(c, env={**os.environ, **settings}, start_new_session=True, **quiet) for c in start]
        deadline = time.monotonic() + LIMIT_S
        answer = Path(folder) / "answer"
        while time.monotonic() < deadline and not answer.exists() and any(job.poll() is None for job in jobs):
            time.sleep(0.02)
        text = answer.read_text() if answer.exists() else "no -"
        for pid in [int(file.name) for file in Path(folder).glob("[0-9]*")]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for job in jobs:
            try:
                job.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    word, _, detail = text.partition(" ")
    return word, detail


def process(what: str, folder: Path) -> None:
    """Run one MPI process; the victim is rank 1."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    (folder / str(os.getpid())).touch()
    MPI.Init_thread(MPI.THREAD_SERIALIZED)

    def tell(text: str) -> None:
        (folder / "new").write_text(text)
        (folder / "new").rename(folder / "answer")

    if what == "connect":
        meet(MPI, folder, tell)
        return
    rank = MPI.COMM_WORLD.Get_rank()
    comm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    if what == "finalize":
        MPI.Finalize()
        if rank == 0:
            tell("yes")
        return
    comm.Barrier()
    began = time.monotonic()
    if rank == 1:
        fall(what, folder, tell)
        while comm.Improbe() is None:
            time.sleep(0.01)
    while True:
        time.sleep(0.001)
        try:
            comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        except MPI.Exception:
            heard = time.monotonic()
            regroup(MPI, comm, what, rank, (heard - began, heard), tell)
            break
    time.sleep(LIMIT_S)


def fall(what: str, folder: Path, tell) -> None:
    if what == "exit":
        os._exit(3)
    if what != "wake":
        os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
    me = os.getpid()
    if os.fork() == 0:  # wakes the stopped process after the others have given it up, and observes what happens to it
        time.sleep(5)
        os.kill(me, signal.SIGCONT)
        time.sleep(2)
        tell("yes" if os.getppid() == me else "no it aborts itself")
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def regroup(MPI, comm, what: str, rank: int, when: tuple[float, float], tell) -> None:
    after, heard = when
    comm.Revoke()
    if what == "ishrink":
        try:
            smaller, request = comm.Ishrink()
            request.Wait()
            if rank == 0:
                tell(f"yes {smaller.Get_size()} are left")
        except MPI.Exception as error:
            if rank == 0:
                tell(f"no {error.Get_error_string()}")
        return
    smaller = comm.Shrink()
    if rank == 0 and what != "wake":
        tell(
            f"yes after {after * 1e3:.0f} ms; revoke and shrink to {smaller.Get_size()}: "
            f"{(time.monotonic() - heard) * 1e3:.1f} ms"
        )


def meet(MPI, folder: Path, tell) -> None:
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    first = False
    try:
        (folder / "first").mkdir()
        first = True
    except FileExistsError:
        pass
    try:
        if first:
            (folder / "port.new").write_text(MPI.Open_port())
            (folder / "port.new").rename(folder / "port")
            joined = MPI.COMM_SELF.Accept((folder / "port").read_text())
        else:
            while not (folder / "port").exists():
                time.sleep(0.01)
            joined = MPI.COMM_SELF.Connect((folder / "port").read_text())
        tell(f"yes {joined.Get_remote_size()} there")
    except MPI.Exception as error:
        tell(f"no {error.Get_error_string()}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        process(sys.argv[1], Path(sys.argv[2]))
        os._exit(0)
    sys.exit(main())
