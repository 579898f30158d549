"""Every way in which a node or its network can fail, to every node of a small run, one run each.

Three hosts in network namespaces (tests/nodes): two that train (two workers each, tensor parallel inside, data parallel
across), one standby node. Needs root. ``python tools/experiments/network_faults.py [WORDS...] [--seeds N]``: only cases
whose name holds one of the words.

Columns: seconds from the fault until it was noticed and until training went on everywhere; epochs opened because of it;
warm restarts; whether every loss is that of a run without faults, bit for bit; seconds until the workers of a node that
was given up had stopped.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import small_runs as runs  # noqa: E402
from ft_runs import Finished, flags, ft_run  # noqa: E402
from nodes import Host, Lab, why_not  # noqa: E402
from nodes.fleet import Fleet  # noqa: E402

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"
STEPS, AT_STEP = 150, 15
LIMIT_S = 50.0
ROLES = {"control": 0, "training": 1, "standby": 2}


@dataclass(frozen=True)
class Kind:
    """``strike(fleet, host, random)`` is the fault, until its end. ``final``: the host stays as it is then."""

    name: str
    strike: Callable[[Fleet, Host, random.Random], None]
    final: bool = False


def _node_loss(fleet, host, _):
    host.lose_power()


def _node_killed(fleet, host, _):
    host.kill_all()


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
    Kind("slow: 20 ms", _degraded(delay_s=0.02)),
    Kind("slow: 1 MB/s", _degraded(rate=1e6)),
)


@dataclass
class Outcome:
    """What came of one case. Times in seconds after the fault, None where that did not happen."""

    end: str
    noticed_s: float | None = None
    resumed_s: float | None = None
    epochs: int = 0
    restarts: int = 0
    stopped_s: float | None = None
    losses: str = ""
    signs: str = ""


def play(kind: Kind, role: str, seed: int, corpus: str, expected: list[float], folder: Path, keep: bool) -> Outcome:
    """One run with one fault."""
    with Lab(3, seed=seed) as lab, Fleet(lab, folder / "run", flags(corpus, LAYOUT, STEPS)) as fleet:
        host = lab.hosts[ROLES[role]]
        fleet.wait_for(lambda: fleet.step() >= AT_STEP and _standbys_are_ready(fleet), 60)
        time.sleep(random.Random(seed).uniform(0, 0.2))
        began = time.time()
        kind.strike(fleet, host, random.Random(seed))
        stopped = _when_stopped(fleet, host, began)
        outcome = _end(kind, fleet, host)
        outcome.stopped_s = next(stopped)
        _judge(outcome, fleet.so_far(), began, expected)
        if keep:
            (folder / "said.txt").write_text(fleet.explain())
        return outcome


def _standbys_are_ready(fleet: Fleet) -> bool:
    return len(fleet.so_far().named("standby_ready")) >= 2


def _when_stopped(fleet: Fleet, host: Host, began: float) -> Iterator[float | None]:
    """Asked at the end of the run: when the last worker that the host had during the fault was seen gone."""
    yield None if any(p.name().startswith("n") for p in host.processes()) else 0.0


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
    resumed = [event for event in later if event.name in ("resumed",)]
    outcome.noticed_s = found[0].wall - began if found else None
    outcome.resumed_s = resumed[-1].wall - began if resumed else None
    outcome.epochs = sum(event.name == "epoch_opened" for event in later)
    outcome.restarts = sum(event.name == "restarted" for event in later)
    outcome.signs = ", ".join(sorted({f"{e.node}: {e.detail['signal']}" for e in found}))
    metrics = done.metrics if (done.folder / "metrics.jsonl").exists() else []
    steps, losses = [m["step"] for m in metrics], [m["loss"] for m in metrics]
    wrong = [m["step"] for m in metrics if m["loss"] != expected[m["step"] - 1]]
    twice = len(steps) - len(set(steps))
    right = f"{len(losses)} right" + (f", {twice} TWICE" if twice else "")
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
    parser.add_argument("words", nargs="*", help="only cases whose name holds all of these")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--seeds", type=int, default=1)
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
        print(f"{'fault':<20} {'node':<9} noticed  resumed epochs restarts  end; losses; signs", flush=True)
        for kind in KINDS:
            for role in given.roles.split(","):
                for seed in range(given.seeds):
                    if any(word not in kind.name for word in given.words):
                        continue
                    case = folder / f"{kind.name} {role} {seed}".replace(" ", "-").replace("%", "pc")
                    case.mkdir()
                    found = play(kind, role, seed, corpus, expected, case, bool(given.keep))
                    print(
                        f"{kind.name:<20} {role:<9} {_seconds(found.noticed_s)} {_seconds(found.resumed_s)} "
                        f"{found.epochs:>6} {found.restarts:>8}  {found.end}; {found.losses}; {found.signs}"
                        + ("" if found.stopped_s == 0.0 else "; ITS WORKERS RUN ON"),
                        flush=True,
                    )


def _seconds(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.2f}"


if __name__ == "__main__":
    main()
