"""``ft run`` as a user starts it, with small scripts: how it starts, ends, and leaves nothing behind."""

import contextlib
import json
import os
import signal
import socket

import pytest
from agent_jobs import Job, ft
from harness import processes

from ft.platform.network import free_port

ATTACHED = """
import os, sys, threading, time
from ft.job.agent.link import Link
from ft.job.messages import Beat, Close, Finish, Open, WorkerDone, WorkerFailed, WorkerReady, WorkerResumed

worker, seated, over, epoch = os.environ["FT_WORKER"], threading.Event(), threading.Event(), 0
def obey(order):
    if order is None: os._exit(70)
    if isinstance(order, Open) and any(seat.worker == worker for seat in order.seats.values()):
        global epoch
        epoch = order.epoch
        link.send(WorkerResumed(worker, epoch, 0))
        seated.set()
    if isinstance(order, Finish): over.set()
link = Link.connect(os.environ)
link.listen(obey)
link.send(WorkerReady(worker, os.environ["FT_NODE"], "127.0.0.1:1"))
standby = os.environ["FT_STANDBY"] == "1"
print("standby" if standby else "ready", worker, flush=True)
def beat():
    while not over.wait(0.1):
        link.send(Beat(0.0, 0, 5, "idle" if standby else "compute", 0.0, step_s=0.01))
threading.Thread(target=beat, daemon=True).start()
"""


@pytest.fixture
def ft_run(tmp_path, jobs):
    def start(text: str, *flags, args=(), preload="none", **environ) -> Job:
        script = tmp_path / "script.py"
        script.write_text(text)
        own = ["--run-dir", "run", "--preload", preload, *flags, script, *args]
        jobs.append(Job(tmp_path, own, **environ))
        return jobs[-1]

    return start


def test_all_workers_finish(ft_run, tmp_path):
    text = (
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE FT_NODE FT_STANDBY OMP_NUM_THREADS'.split()\n"
        "print([os.environ[n] for n in names], sys.argv[1:], sys.path[0], os.getcwd(), __name__, __file__)\n"
        "import atexit; atexit.register(print, 'last words')\n"
    )
    job = ft_run(text, "--nproc-per-node", 3, args=["--lr", "a b"], OMP_NUM_THREADS="1")
    assert job.wait() == 0, job.text()
    for rank in range(3):
        log = (tmp_path / "run" / "logs" / f"n0.w{rank}.log").read_text()
        assert f"['{rank}', '{rank}', '3', 'n0', '', '1'] ['--lr', 'a b']" in log
        assert f"{tmp_path} {tmp_path} __main__ {tmp_path}/script.py" in log
        assert log.endswith("last words\n")
    assert job.text().count("last words") == 2, "the first and the last rank are shown"
    assert "no worker called ft.attach or ft.protect" in job.text()


def test_a_module_runs_as_main(jobs, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "train.py").write_text("import sys; print('as', __name__, __package__, sys.argv[1:])")
    jobs.append(job := Job(tmp_path, ["--run-dir", "run", "--preload", "none", "-m", "pack.train", "-x"]))
    assert job.wait() == 0, job.text()
    assert "as __main__ pack ['-x']" in job.text()


def test_one_failing_worker_ends_all_and_its_last_words_are_shown(ft_run):
    text = "import os, sys, time\nif os.environ['RANK'] == '1': print('cannot go on'); sys.exit(3)\ntime.sleep(1000)"
    job = ft_run(text, "--nproc-per-node", 3)
    assert job.wait() not in (0, 2)
    assert "n0.w1 (logical rank 1) exited with code 3" in job.text()
    assert job.text().count("cannot go on") == 1


def test_an_exception_is_shown_from_the_scripts_first_line_on(ft_run, tmp_path):
    job = ft_run("def deep():\n    raise KeyError('which')\ndeep()\n")
    assert job.wait() not in (0, 2)
    log = (tmp_path / "run" / "logs" / "n0.w0.log").read_text()
    assert "KeyError: 'which'" in log and "ft/job/agent" not in log and log.startswith("Traceback")


LEFT_INSIDE_TORCH = """
import sys, threading, time
import torch.distributed as dist

store, entered = dist.HashStore(), threading.Event()
def wait_in_torch():
    entered.set()
    store.get("word")
threading.Thread(target=wait_in_torch, daemon=True).start()
entered.wait()
class ReleasedInTheEnd:
    def __del__(self, word=store.set, wait=time.sleep):
        word("word", "")
        wait(5)
sys.kept_to_the_last = ReleasedInTheEnd()
"""
"""The thread comes back from C++ when the interpreter is being finalised: that aborts the process."""


def test_a_torchrun_script_finds_its_process_group_and_a_thread_left_inside_torch_aborts_no_worker(ft_run):
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "value = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(value)\n"
        "print('sum', value.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    job = ft_run(text + LEFT_INSIDE_TORCH, "--nproc-per-node", 2, preload="torch")
    assert job.wait() == 0, job.text()
    assert job.text().count("sum 3.0") == 2


def test_two_nodes_on_one_machine_form_one_group(ft_run, tmp_path):
    text = (
        "import os, torch.distributed as dist\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "store = dist.TCPStore(*place, 4, os.environ['RANK'] == '0')\n"
        "print('rank', os.environ['RANK'], 'on', os.environ['FT_NODE'], flush=True)\n"
        "store.add('done', 1)\n"
        "while os.environ['RANK'] == '0' and store.add('done', 0) < 4: pass\n"
    )
    flags = ["--nnodes", 2, "--nproc-per-node", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    second = ft_run(text, *flags, "--node-rank", 1, preload="torch")
    first = ft_run(text, *flags, "--node-rank", 0, preload="torch")
    assert (first.wait(), second.wait()) == (0, 0), first.text() + second.text()
    logs = sorted((path.name, path.read_text()) for path in (tmp_path / "run" / "logs").glob("n?.w*.log"))
    assert logs == [(f"n{r // 2}.w{r % 2}.log", f"rank {r} on n{r // 2}\n") for r in range(4)]


def test_a_failure_on_one_node_ends_the_other_one_too(ft_run):
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(1000)"
    flags = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    first = ft_run(text, *flags, "--node-rank", 0)
    second = ft_run(text, *flags, "--node-rank", 1)
    assert first.wait() not in (0, 2) and second.wait() not in (0, 2)
    assert "n1.w0 (logical rank 1) exited with code 5" in second.text()


def test_kill_9_of_the_agent_leaves_nothing(ft_run):
    text = (
        "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\nprint('started', flush=True)\ntime.sleep(1000)"
    )
    job = ft_run(text, "--nproc-per-node", 2)
    for worker in ("n0.w0", "n0.w1"):
        job.wait_for_log(worker, "started")
    assert len(job.left()) >= 7, "agent, pool, control plane, workers and their children"
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()  # the fixture complains of what is left


SAVES = """import os, signal, sys, time
def save(*_): os.write(1, b'saved'); sys.exit(0)  # print() may be interrupted by a signal, and then refuses
signal.signal(signal.SIGTERM, save)
print('ready', flush=True)
while True: time.sleep(1000)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_to_ft_run_or_to_all_processes_of_a_run_let_workers_save(name, ft_run, tmp_path):
    job = ft_run(SAVES, "--nproc-per-node", 2)
    for worker in ("n0.w0", "n0.w1"):
        job.wait_for_log(worker, "ready")
    for pid in [job.process.pid] if name == "SIGTERM" else job.left():  # Slurm signals all of them
        with contextlib.suppress(ProcessLookupError):  # those that got it first have had the others end
            os.kill(pid, signal.Signals[name])
    assert job.wait() in (0, 128 + signal.Signals[name]), job.text()
    assert f"{name}: workers are told to save and end" in job.text()
    for worker in ("n0.w0", "n0.w1"):
        assert "saved" in (tmp_path / "run" / "logs" / f"{worker}.log").read_text()


def test_under_nohup_a_closed_terminal_is_no_request_and_two_requests_at_once_are_one(jobs, tmp_path):
    nohup = (
        "import signal, sys; from ft.cli import main; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.exit(main())"
    )
    (tmp_path / "train.py").write_text(SAVES)
    jobs.append(job := Job(tmp_path, ["--run-dir", "run", "--preload", "none", "train.py"], entry=("-c", nohup)))
    job.wait_for_log("n0.w0", "ready")
    for signum in (signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM):
        job.process.send_signal(signum)
    assert job.wait() in (0, 128 + signal.SIGUSR2, 128 + signal.SIGTERM), job.text()
    assert "SIGHUP" not in job.text() and "saved" in (tmp_path / "run" / "logs" / "n0.w0.log").read_text()


def test_workers_that_know_no_sigterm_end_with_its_code(ft_run):
    job = ft_run("import time; print('ready', flush=True); time.sleep(1000)", "--nproc-per-node", 2)
    job.wait_for_log("n0.w1", "ready")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.text()


def test_a_second_signal_kills(ft_run):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    text = f"import signal, time\n{deaf}\ntime.sleep(1000)"
    job = ft_run(text)
    job.wait_for_log("n0.w0", "deaf")
    job.process.send_signal(signal.SIGTERM)
    job.wait_for(lambda: "a second signal kills" in job.text(), "the answer to the first signal")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT, job.text()


def test_a_pool_that_was_killed_is_started_again_and_forks_a_standby(ft_run, tmp_path):
    text = f"""import os, time
while os.environ["FT_STANDBY"] == "" and not os.path.exists("go"): time.sleep(0.01)
{ATTACHED}
while not standby and not os.path.exists("end"): time.sleep(0.01)
if not standby: link.send(WorkerDone(worker, epoch, 5))
over.wait()
"""
    job = ft_run(text, "--nproc-per-node", 2, "--standby", 1)
    job.wait_for((tmp_path / "run" / "logs" / "n0.w1.log").exists, "the second worker")
    os.kill(job.pid_of("ft-pool"), signal.SIGKILL)
    (tmp_path / "go").touch()
    job.wait_for_log("n0.w2", "standby")
    (tmp_path / "end").touch()
    assert job.wait() == 0, job.text()
    assert "the warm pool was killed by SIGKILL; starting another one" in job.text()


def test_a_hung_worker_is_killed_with_all_that_it_has_started(ft_run, tmp_path):
    text = f"""{ATTACHED}
import subprocess
if os.environ["FT_RESTART"] != "0": os._exit(9)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
seated.wait()
print("child", child.pid, flush=True)
time.sleep(1000)
"""
    job = ft_run(text, "--nproc-per-node", 2, "--max-restarts", 0)
    log = tmp_path / "run" / "logs" / "n0.w1.log"
    job.wait_for_log("n0.w0", "child")
    job.wait_for_log("n0.w1", "child")
    child = int(log.read_text().split("child ")[1].split()[0])
    os.kill(processes.stat(child)[1], signal.SIGSTOP)
    job.wait_for(lambda: not processes.runs(child), "the end of the hung worker's child")


def life(waits: str) -> str:
    """Return a script that is protected, says which life it is in, waits, and has then trained."""
    return f"""{ATTACHED}
seated.wait()
print("life", os.environ["FT_RESTART"], flush=True)
{waits}
link.send(WorkerDone(worker, epoch, 5))
over.wait()
"""


def test_a_warm_restart_starts_new_workers(ft_run, tmp_path):
    text = f"""{ATTACHED}
seated.wait()
if os.environ["FT_RESTART"] == "0" and os.environ["RANK"] == "1":
    link.send(WorkerFailed(worker, 0, 5, ["ZeroDivisionError", "ArithmeticError", "Exception"], "a bug"))
    time.sleep(1000)
while os.environ["FT_RESTART"] == "0": time.sleep(1)
print("life", os.environ["FT_RESTART"], "of rank", os.environ["RANK"], os.environ["MASTER_PORT"], flush=True)
link.send(WorkerDone(worker, epoch, 5))
over.wait()
"""
    job = ft_run(text, "--nproc-per-node", 2)
    assert job.wait() == 0, job.text()
    assert "warm restart 1" in job.text()
    lives = sorted(line for line in job.text().splitlines() if line.startswith("life"))
    assert [line.rsplit(" ", 1)[0] for line in lives] == ["life 1 of rank 0", "life 1 of rank 1"]


def test_a_killed_control_plane_is_started_again_and_nobody_else_notices(ft_run, tmp_path):
    job = ft_run(life('while not os.path.exists("go on"): time.sleep(0.01)'), "--nproc-per-node", 2)
    job.wait_for_log("n0.w0", "life 0")
    os.kill(job.pid_of("ft-control"), signal.SIGKILL)
    (tmp_path / "go on").touch()
    assert job.wait() == 0, job.text()
    assert "control plane was killed by SIGKILL; another one takes over" in job.text() and "life 1" not in job.text()
    assert "control_back" in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_control_plane_that_dies_again_and_again_means_a_warm_restart(ft_run, tmp_path):
    job = ft_run(life('while os.environ["FT_RESTART"] == "0": time.sleep(1)'), "--nproc-per-node", 2)
    job.wait_for_log("n0.w0", "life 0")
    for _ in range(4):
        job.wait_for(lambda: job.named("ft-control"), "a control plane")
        (pid,) = job.named("ft-control")
        os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda pid=pid: pid not in job.named("ft-control"), "the end of the control plane")
    assert job.wait(180) == 0, job.text()
    assert "again and again" in job.text() and "warm restart 1" in job.text() and "life 1" in job.text()
    assert "control_restarted" in (tmp_path / "run" / "events.jsonl").read_text()


def test_what_cannot_work_ends_with_2_before_anything_starts(ft_run, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = ft_run("print('never')", "--rdzv-endpoint", f"127.0.0.1:{port}")
        assert job.wait() == 2
    assert f"cannot listen at 127.0.0.1:{port}" in job.text() and "fix:" in job.text()
    assert f"process {os.getpid()} (" in job.text()
    assert not (tmp_path / "run").exists()


def test_planned_faults_of_a_script_that_never_joins_the_run_end_it_with_2(ft_run, tmp_path):
    job = ft_run("print('trained')", "--nproc-per-node", 2, "--inject", "kill@step=3:rank=1")
    assert job.wait() == 2, job.text()
    assert "nothing protects this run until its script calls ft.attach" in job.text()
    assert "none of the 1 planned fault(s) could act" in job.text() and "fix:" in job.text()
    shown = ft("status", "run", folder=tmp_path)
    assert "stopped with code 2" in shown.stdout and "peers hold" not in shown.stdout
    assert "none: no worker has ever joined the run" in shown.stdout


def test_status_of_a_run_whose_ft_was_killed_says_so_and_ends(ft_run, tmp_path):
    job = ft_run(f"{ATTACHED}\nseated.wait()\nprint('seated', flush=True)\ntime.sleep(1000)", "--nproc-per-node", 2)
    job.wait_for_log("n0.w1", "seated")
    job.wait_for(lambda: "from now on it is protected by hot-swap" in job.text(), "the first worker under a guard")
    live = ft("status", "run", "--json", folder=tmp_path)
    assert live.returncode == 0 and json.loads(live.stdout)["gone"] == "", live.stdout
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    shown = ft("status", "run", "--watch", folder=tmp_path)
    assert shown.returncode == 1 and "gone (it was " in shown.stdout, shown.stdout
    assert "the process ft run on this host has disappeared" in shown.stdout
    assert ft("status", "run", folder=tmp_path).returncode == 1
