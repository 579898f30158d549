"""Every kind of fault, faults on faults, and the ends of what can be recovered in place."""

import contextlib
import json
import random
import signal
import socket

import psutil
import pytest
import small_runs as runs
from ft_runs import ROOT, Running, flags, ft_run

from ft.base.errors import ENDED_EARLY, NOT_INJECTED, NOT_SAVED
from ft.cli import main as cli

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"


def run(corpus, tmp_path, faults, steps=16, extra="", **how):
    folder = tmp_path / "run"
    how["options"] = f"{how.get('options', '')} --inject {faults}" if faults else how.get("options", "")
    return ft_run(folder, flags(corpus, f"{LAYOUT} {extra}", steps), **how)


def actions(done) -> list[str]:
    return [event.detail["action"] for event in done.named("fault_detected")]


IN_PLACE = {
    "a hung worker": ("hang@step=6:rank=1,hang@step=11:rank=2:phase=backward", ["replace"] * 2, {}),
    "an inner rank of trees with a fan-out of 2, which relays what ranks 3 and 0 say": (
        "kill@step=5:rank=1,hang@step=10:rank=1:phase=optimizer",
        ["replace"] * 2,
        {"script": "tests/helpers/narrow_gpt.py"},
    ),
    "a transient exception": (
        "exception@step=5:rank=3:phase=backward,exception@step=10:rank=0:phase=optimizer",
        ["in place"] * 2,
        {},
    ),
    "an exception that says the node is bad": ("exception@step=5:rank=3:error=node", ["replace"], {}),
    "a dropped connection": ("drop@step=5:rank=1,drop@step=10:rank=2:phase=backward", {"in place"}, {}),
    "a slow rank, which is no failure": ("slow@step=5:rank=1:for=1s:factor=4", [], {}),
    "two workers of different shards at once": (
        "kill@step=7:rank=0:phase=forward,kill@step=6:rank=3:phase=leave",
        None,
        {"standby": 2},
    ),
    "no standby, so that a worker is started for the seat": ("kill@step=7:rank=1", None, {"standby": 0}),
}
"""Name -> faults, the actions that they must lead to (a set: at most these; None: any), and options of the run."""
DAILY = ("an inner rank", "two workers", "no standby")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (not name.startswith(DAILY))) for name in IN_PLACE]
)
def test_faults_that_are_recovered_without_a_restart(name, corpus, reference, tmp_path):
    faults, wanted, how = IN_PLACE[name]
    done = run(corpus, tmp_path, faults, **how)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    if isinstance(wanted, list):
        assert actions(done) == wanted, done.explain()
    elif wanted is not None:
        assert set(actions(done)) <= wanted, done.explain()
    if wanted is not None and "replace" not in wanted:
        assert not done.named("worker_lost") and not any(e.detail["joiners"] for e in done.named("epoch_opened"))
    if name == "a hung worker":
        assert all("stopped" in event.detail["reason"] for event in done.named("fault_detected"))
    assert done.losses == reference(4, LAYOUT, 16)


def test_a_fault_whose_workers_reports_are_lost_happens_once_and_strictly_all_have_to_happen(
    corpus, reference, tmp_path
):
    faults = "lose-reports@step=6:rank=1,kill@step=6:rank=1:phase=backward,kill@step=6:rank=0:phase=assemble"
    done = run(corpus, tmp_path, faults, options="--inject-strict")
    assert [event.detail["number"] for event in done.named("fault_injected")] == [1, 2], done.explain()
    assert actions(done) == ["replace"], done.explain()
    assert done.losses == reference(4, LAYOUT, 16)
    missed = "1 of 3 planned fault(s) did not happen: kill of rank 0 at step 6 (assemble)"  # nobody takes over rank 0
    assert done.code == NOT_INJECTED and missed in done.output, done.explain()


@pytest.mark.long
def test_a_software_error_restarts_from_the_checkpoint(corpus, reference, tmp_path):
    done = run(
        corpus, tmp_path, "exception@step=9:rank=1:error=software", extra=f"--save {tmp_path}/save --save-interval 4"
    )
    assert done.code == 0, done.explain()
    assert actions(done) == ["restart"] and len(done.named("restarted")) == 1
    assert "loaded" in done.output and "going on after step 8" in done.output, done.explain()
    assert done.losses == reference(4, LAYOUT, 16)


def test_a_user_error_ends_the_run_with_its_message(corpus, tmp_path):
    done = run(corpus, tmp_path, "exception@step=4:rank=1:error=user")
    assert done.code == 2, done.explain()
    assert "injected fault" in done.output


@pytest.mark.long
def test_owner_and_only_copy_lost_restarts_from_the_checkpoint(corpus, reference, tmp_path):
    done = run(
        corpus,
        tmp_path,
        "kill@step=7:rank=2:phase=forward,kill@step=7:rank=3:phase=leave",
        extra=f"--save {tmp_path}/save --save-interval 4",
    )
    assert done.code == 0 and len(done.named("restarted")) == 1, done.explain()
    assert "both copies lost" in done.output, done.explain()
    assert done.losses == reference(4, LAYOUT, 16)


@pytest.mark.parametrize("phase", ["forward", "leave"])
def test_a_worker_that_is_killed_because_it_hangs_leaves_its_snapshots_to_its_successor(
    phase, corpus, reference, tmp_path
):
    """Rank 3 holds the only copy of rank 2's state and its own state, of which rank 2 had the only copy."""
    faults = f"kill@step=7:rank=2:phase=forward,hang@step=7:rank=3:phase={phase}"
    done = run(corpus, tmp_path, faults, standby=2)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    sources = [event.detail["sources"] for event in done.named("state_restored")]
    assert sources[-1]["2"] == "copy:3" and sources[-1]["3"] == "own", done.explain()
    assert done.losses == reference(4, LAYOUT, 16)


def test_a_corrupt_peer_copy_is_found_and_not_used(corpus, reference, tmp_path):
    """Rank 3 holds the only copy of rank 2's shard and flips a byte in it; then rank 2 dies."""
    done = run(
        corpus,
        tmp_path,
        "corrupt-snapshot@step=7:rank=3:copies=peer:phase=backward,kill@step=7:rank=2:phase=reduce",
        extra=f"--save {tmp_path}/save --save-interval 4",
    )
    assert done.code == 0, done.explain()
    assert done.losses == reference(4, LAYOUT, 16)


def test_a_second_copy_serves_where_the_first_is_corrupt(corpus, reference, tmp_path):
    layout = "--use-distributed-optimizer"
    folder = tmp_path / "run"
    faults = "corrupt-snapshot@step=7:rank=3:copies=peer:phase=backward,kill@step=7:rank=2:phase=reduce"
    wanted = flags(corpus, f"{layout} --ft-snapshot-peers 2", 16)
    done = ft_run(folder, wanted, options=f"--inject {faults}")
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert done.losses == reference(4, layout, 16)


def test_training_does_not_stop_for_the_control_plane_and_a_fault_in_its_absence_is_recovered(
    corpus, reference, tmp_path
):
    done = run(corpus, tmp_path, "kill-control@step=6,kill@step=8:rank=2,kill@step=30:rank=1", steps=60)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert len(done.named("control_back")) == 1 and len(done.named("worker_lost")) == 2, done.explain()
    assert done.losses == reference(4, LAYOUT, 60)


def test_strangers_at_every_port_of_a_run_change_nothing(corpus, reference, tmp_path):
    wanted = flags(corpus, LAYOUT, 150)
    job = Running(tmp_path / "run", "pretrain_gpt.py", wanted, options="--inject kill@step=120:rank=2")
    job.wait_for(lambda: job.step() >= 3)
    listening = listening_ports(psutil.Process(job.process.pid))
    assert len(listening) >= 6, "control plane, rendezvous stores, snapshot servers"
    for port in listening:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2) as stranger:
            stranger.settimeout(0.2)
            stranger.sendall(b"\x00\x01set control/order/0\n" * 20)
            stranger.recv(1000)
    done = job.wait()
    assert done.code == 0 and len(done.named("worker_lost")) == 1, done.explain()
    assert done.losses == reference(4, LAYOUT, 150)


def listening_ports(parent: psutil.Process) -> set[int]:
    """TCP ports at which a process or one below it listens; one that ends meanwhile is left out."""
    found = set()
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            connections = process.net_connections("tcp")
            found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def test_sigterm_saves_and_ends_in_order(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    saving = f"{LAYOUT} --save {tmp_path}/save"
    job = Running(folder, "pretrain_gpt.py", flags(corpus, saving, 100_000))
    job.wait_for(lambda: job.step() >= 5)
    job.process.send_signal(signal.SIGTERM)
    done = job.wait(180)
    assert done.code == ENDED_EARLY, done.explain()
    assert "SIGTERM received" in done.output and "saved" in done.output, done.explain()
    last = done.metrics[-1]["step"]
    assert status_of(done, capsys)["phase"] == f"ended early (SIGTERM) at {last} of 100000"
    assert [event.step for event in done.named("saved")] == [last]


@pytest.mark.parametrize(
    ("small_disk", "saves"), [("1m", []), ("3m", [4, 8])], ids=["none", "some"], indirect=["small_disk"]
)
def test_a_run_whose_last_save_fails_says_so_at_its_end(small_disk, saves, corpus, tmp_path, capsys):
    saving = f"--save {small_disk} --save-interval 4"
    done = ft_run(tmp_path / "run", flags(corpus, saving, 12), nproc=2, standby=0)
    assert done.code == NOT_SAVED and len(done.losses) == 12, done.explain()
    assert [event.step for event in done.named("saved")] == saves, done.explain()
    failed = [event.step for event in done.named("save_failed")]
    assert failed == [step for step in (4, 8, 12) if step not in saves]
    found = status_of(done, capsys)
    assert found["phase"] == "finished, not saved" and "THE LAST SAVE FAILED (step 12, " in found["saves"]
    assert "the run ends without it" in done.output and done.output.count("training goes on") == len(failed) - 1
    assert cli(["report", str(done.folder)]) == 0
    assert "THE LAST SAVE FAILED" in capsys.readouterr().out
    assert cli(["diagnose", "crash", str(done.folder)]) == 0


def status_of(done, capsys) -> dict:
    """Return what ft status says of a run."""
    capsys.readouterr()
    assert cli(["status", "--json", str(done.folder)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_forty_random_faults(corpus, reference, tmp_path, seed):
    """One long run; every fault is recovered, and the losses are those of a run without any."""
    choose, steps = random.Random(seed), 250
    phases = ("forward", "backward", "reduce", "optimizer", "transfer", "between")
    kinds = ("kill", "kill", "kill", "hang", "exception", "drop")
    faults = [
        f"{choose.choice(kinds)}@step={6 * (i + 1)}:rank={choose.randrange(4)}:phase={choose.choice(phases)}"
        for i in range(40)
    ]
    folder = tmp_path / "run"
    saving = f"{LAYOUT} --save {tmp_path}/save --save-interval 50"
    job = Running(folder, "pretrain_gpt.py", flags(corpus, saving, steps), options=f"--inject {','.join(faults)}")
    done = job.wait(280)
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == 40, done.explain()
    assert done.losses == reference(4, LAYOUT, steps)


def test_someone_elses_trainer(tmp_path):
    """A plain megatron-core loop that knows nothing of megatron/ft_trainer."""
    losses = {}
    for name, faults in (("undisturbed", ""), ("faulty", "--inject kill@step=5:rank=2,hang@step=12:rank=1")):
        folder, file = tmp_path / name, tmp_path / f"{name}.jsonl"
        done = ft_run(folder, f"--losses {file}", script=str(ROOT / "examples" / "own_trainer.py"), options=faults)
        assert done.code == 0, done.explain()
        losses[name] = {m["step"]: m["loss"] for m in map(json.loads, file.read_text().splitlines())}
    assert len(losses["undisturbed"]) == 20
    assert losses["faulty"] == losses["undisturbed"]


def test_hot_swap_without_ft_run_is_refused(ranks, corpus):
    handle = ranks.start(
        runs.launch, 2, flags(corpus, LAYOUT.replace("--pipeline-model-parallel-size 2", "")), init=False
    )
    assert [rank.value for rank in handle.wait(180)] == [2, 2]
    assert "ft run" in handle.output(0)
