"""Every way in which a node or its network can fail, to every node of a small run, one run each.

Three hosts in network namespaces (tests/helpers/nodes): two that train (two workers each, tensor parallel inside, data
parallel across), one standby node. Needs root. ``python tools/experiments/network_faults.py [WORDS...] [--seeds N]``:
only cases whose name holds one of the words.

Columns: seconds from the fault until it was noticed, until training went on everywhere, and until none of the workers
was left that the node had; epochs opened because of it; warm restarts; how the agents ended, whether every loss is that
of a run without faults, bit for bit, whom the control plane blamed for what, and under which names the node came back.
"""

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import psutil  # noqa: E402
import small_runs as runs  # noqa: E402
from ft_runs import Finished, flags, ft_run  # noqa: E402
from nodes import Host, Lab, why_not  # noqa: E402
from nodes.fleet import Fleet  # noqa: E402

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"
STEPS, AT_STEP = 110, 10
LIMIT_S = 60.0
ROLES = {"control": 0, "training": 1, "standby": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of fault. ``strike(fleet, host, random)`` injects it and returns at its end. ``final``: the host does not
    come back, and how its agent ends, if it does, is ignored."""

    name: str
    strike: Callable[[Fleet, Host, random.Random], None]
    final: bool = False


def _node_loss(fleet, host, _):
    host.lose_power()


def _node_killed(fleet, host, _):
    host.kill_all()


def _node_back(fleet, host, _):
    host.lose_power()
    time.sleep(1)
    host.mend()
    fleet.come_back(host)


def _paused(seconds: float):
    def strike(fleet, host, _):
        host.pause()
        time.sleep(seconds)
        host.go_on()

    return strike


def _link_down(fleet, host, _):
    host.cut()


def _interface_down(fleet, host, _):
    host.interface(up=False)


def _blip(seconds: float):
    def strike(fleet, host, _):
        host.cut()
        time.sleep(seconds)
        host.mend()

    return strike


def _flapping(least_s: float, most_s: float, times: int):
    def strike(fleet, host, chance):
        for _ in range(times):
            host.cut()
            time.sleep(chance.uniform(least_s, most_s))
            host.mend()
            time.sleep(chance.uniform(least_s, most_s))

    return strike


def _one_way(seconds: float | None, **ways: bool):
    def strike(fleet, host, _):
        host.cut(**ways)
        if seconds is not None:
            time.sleep(seconds)
            host.mend()

    return strike


def _degraded(**settings: float):
    def strike(fleet, host, _):
        host.degrade(**settings)
        time.sleep(10)
        host.mend()

    return strike


KINDS = (
    Kind("node loss", _node_loss, final=True),
    Kind("node killed", _node_killed, final=True),
    Kind("node lost and back", _node_back),
    Kind("node paused 6 s", _paused(6.0)),
    Kind("link down", _link_down, final=True),
    Kind("interface down", _interface_down, final=True),
    Kind("link down 1 s", _blip(1.0)),
    Kind("link down 8 s", _blip(8.0)),
    Kind("flapping fast", _flapping(0.1, 0.6, 10)),
    Kind("flapping slowly", _flapping(1.0, 5.0, 4)),
    Kind("one way: out", _one_way(None, into=False), final=True),
    Kind("one way: into", _one_way(None, out=False), final=True),
    Kind("one way: out 8 s", _one_way(8.0, into=False)),
    Kind("one way: into 8 s", _one_way(8.0, out=False)),
    Kind("loss 5 %", _degraded(loss=0.05)),
    Kind("slow, 20 ms", _degraded(delay_s=0.02)),
    Kind("slow, 8 Mbit per s", _degraded(rate=1e6)),
)


@dataclass
class Outcome:
    """The outcome of one case. Times are in seconds after the fault, None if the event did not occur."""

    end: str
    noticed_s: float | None = None
    resumed_s: float | None = None
    gone_s: float | None = None
    epochs: int = 0
    restarts: int = 0
    losses: str = ""
    signs: str = ""
    back: str = ""


def play(kind: Kind, role: str, seed: int, corpus: str, expected: list[float], folder: Path, keep: bool) -> Outcome:
    """Run one run with one fault."""
    with Lab(3, seed=seed) as lab, Fleet(lab, folder / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        host = lab.hosts[ROLES[role]]
        fleet.wait_for(lambda: fleet.step() >= AT_STEP and _standbys_are_ready(fleet), 60)
        time.sleep(random.Random(seed).uniform(0, 0.2))
        workers, began = _workers(fleet, host), time.time()
        gone: list[float] = []
        threading.Thread(target=_watch, args=(workers, began, gone), daemon=True).start()
        kind.strike(fleet, host, random.Random(seed))
        outcome = _end(kind, fleet, host)
        outcome.gone_s = gone[0] if gone else None
        _judge(outcome, fleet.so_far(), began, expected)
        if keep:
            (folder / "said.txt").write_text(fleet.explain())
        return outcome


def _standbys_are_ready(fleet: Fleet) -> bool:
    return len(fleet.so_far().named("standby_ready")) >= 2


def _workers(fleet: Fleet, host: Host) -> Mapping[str, int]:
    started = fleet.so_far().named("worker_started")
    return {event.worker: event.detail["pid"] for event in started if event.node == f"n{host.index}"}


def _watch(workers: Mapping[str, int], began: float, gone: list[float]) -> None:
    """Append to ``gone`` the seconds after ``began`` at which the last of the processes had ended."""
    while any(psutil.pid_exists(pid) for pid in workers.values()):
        time.sleep(0.02)
    gone.append(time.time() - began)


def _end(kind: Kind, fleet: Fleet, host: Host) -> Outcome:
    deadline = time.monotonic() + LIMIT_S
    others = [node for node in fleet.nodes if node.host is not host or not kind.final]
    while time.monotonic() < deadline:
        if all(node.process.poll() is not None for node in others):
            codes = sorted({node.process.poll() for node in others})
            return Outcome("ended " + ",".join(map(str, codes)))
        time.sleep(0.1)
    names = [node.host.name for node in others if node.process.poll() is None]
    return Outcome("HANGS: " + ",".join(names))


def _judge(outcome: Outcome, done: Finished, began: float, expected: list[float]) -> None:
    later = [event for event in done.events if event.wall > began]
    found = [event for event in later if event.name == "fault_detected"]
    resumed = [event for event in later if event.name == "resumed"]
    outcome.noticed_s = found[0].wall - began if found else None
    outcome.resumed_s = resumed[-1].wall - began if resumed else None
    outcome.epochs = sum(event.name == "epoch_opened" for event in later)
    outcome.restarts = sum(event.name == "restarted" for event in later)
    outcome.signs = ", ".join(sorted({f"{e.node}: {e.detail['signal']}" for e in found})) or "nobody is blamed"
    returned = {event.node for event in later if event.name == "standby_ready" and "-" in event.node}
    outcome.back = f"back as {', '.join(sorted(returned))}" if returned else "not back"
    metrics = done.metrics if (done.folder / "metrics.jsonl").exists() else []
    steps = [m["step"] for m in metrics]
    wrong = [m["step"] for m in metrics if m["loss"] != expected[m["step"] - 1]]
    twice = len(steps) - len(set(steps))
    right = f"{len(steps)} losses right" + (f", {twice} TWICE" if twice else "")
    outcome.losses = f"WRONG at {wrong[:5]}" if wrong else right


@contextmanager
def scratch(keep: str | None) -> Iterator[Path]:
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
        return
    folder = Path(tempfile.mkdtemp(prefix="network-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only kinds whose name holds one of these")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep", help="folder for what the runs write")
    given = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    from megatron import patches

    patches.apply()
    with scratch(given.keep) as folder:
        corpus = runs.make_corpus(folder)
        plain = flags(corpus, LAYOUT, STEPS).replace("--ft-hot-swap", f"--metrics-file {folder}/plain.jsonl")
        ft_run(folder / "plain", plain, standby=0)
        expected = runs.losses(folder / "plain.jsonl")
        print(f"{'fault':<20} {'node':<9} noticed resumed    gone epochs restarts", flush=True)
        cases = [(kind, role) for kind in KINDS for role in given.roles.split(",")]
        for kind, role in cases:
            if given.words and not any(word in kind.name for word in given.words):
                continue
            for seed in range(given.first_seed, given.first_seed + given.seeds):
                case = folder / f"{kind.name} {role} {seed}".replace(" ", "-").replace("%", "pc")
                case.mkdir()
                found = play(kind, role, seed, corpus, expected, case, bool(given.keep))
                times = " ".join(_seconds(value) for value in (found.noticed_s, found.resumed_s, found.gone_s))
                said = "; ".join([found.end, found.losses, found.signs, found.back])
                print(f"{kind.name:<20} {role:<9} {times} {found.epochs:>6} {found.restarts:>8}  {said}", flush=True)


def _seconds(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.2f}"


if __name__ == "__main__":
    main()
