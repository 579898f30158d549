"""Measure the loss and the return of a replica group with torchft, with the same model as the other benchmarks.

    python tools/bench/peers/torchft_recovery.py --python VENV/bin/python

Prints one JSON line. torchft is not a dependency of this project: VENV is an environment with torchft-nightly and this
project's dependencies; without it, the line says so. Every replica group is one process that is restarted as soon as it
ends, as torchrun would do; a lighthouse decides which groups are in a quorum. Other benchmarks call ``measure``.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
SEQ, MICRO_BATCH, VOCAB, LAYERS, HIDDEN, HEADS = 32, 2, 512, 4, 32, 4
"""The same model as in tests/helpers/small_runs.py."""
START_S, STALL_S, BACK_S = 180.0, 90.0, 120.0
_SETTLED_STEPS = 25


@dataclass(frozen=True)
class Way:
    """A configuration of torchft, in seconds; None: torchft's default.

    Attributes:
        name: name of the configuration.
        join_s: how long the lighthouse waits for living replicas that have not asked; 60 is the default of its command
            line.
        heartbeat_s: heartbeat timeout of the lighthouse.
        timeout_s: timeout of torchft's manager.
    """

    name: str
    join_s: float = 60.0
    heartbeat_s: float | None = None
    timeout_s: float | None = None


DEFAULTS, TUNED = Way("defaults"), Way("tuned", join_s=0.1, heartbeat_s=1.0, timeout_s=5.0)


def measure(python: str, replicas: int = 3, faults: int = 3, kind: str = "kill", way: Way = DEFAULTS) -> dict:
    """Kill (or stop) one of ``replicas`` groups ``faults`` times; return medians in seconds.

    Returns:
        ``{"skipped": why}`` if torchft cannot be run; otherwise stall_s: longest time between two steps of the others
        after the fault, beyond their usual step; back_s: until the killed group is in a quorum again; rejoin_stall_s:
        the others' longest step around that moment, beyond the usual step. Each with all its values.
    """
    if problem := missing(python):
        return {"skipped": problem}
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(python, Path(folder), replicas, way)
        try:
            run.start()
            found = [run.strike(number % replicas, kind) for number in range(faults)]
        except TimeoutError as error:
            return {"skipped": f"torchft ({way.name}): {error}"}
        finally:
            run.close()
    names = [name for name in ("stall_s", "back_s", "rejoin_stall_s") if all(name in one for one in found)]
    medians = {name: round(statistics.median(one[name] for one in found), 3) for name in names}
    every = {f"{name.removesuffix('_s')}_all_s": [round(one[name], 3) for one in found] for name in names}
    return {**medians, **every, "step_s": round(statistics.median(one["step_s"] for one in found), 4)}


def missing(python: str) -> str:
    """Return why torchft cannot be run there, "" if it can."""
    try:
        done = subprocess.run(
            [python, "-c", "import torchft.manager, megatron.core"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {error}"
    last = (done.stderr.strip().splitlines() or ["?"])[-1]
    return "" if done.returncode == 0 else f"torchft is not installed for {python}: {last}"


class _Run:
    """A lighthouse and replica groups, each in its own process. Steps are read from the files that the groups write."""

    def __init__(self, python: str, folder: Path, replicas: int, way: Way):
        self._python, self._folder, self._replicas, self._way = python, folder, replicas, way
        self._processes: dict[int, subprocess.Popen] = {}
        self._lighthouse: subprocess.Popen | None = None
        self._address = ""
        self._read: dict[int, list[dict]] = {}
        self._offsets: dict[int, int] = {}

    def start(self) -> None:
        self._lighthouse = self._spawn(["--lighthouse", json.dumps(self._way.__dict__)], stdout=subprocess.PIPE)
        self._address = self._lighthouse.stdout.readline().strip()
        for replica in range(self._replicas):
            self._begin(replica)
        self._wait(START_S, "all groups in a quorum", lambda: self._settled() is not None)

    def strike(self, victim: int, kind: str) -> dict[str, float]:
        self._wait(START_S, "all groups in a quorum", lambda: self._settled() is not None)
        step_s = self._settled()
        at = time.monotonic()
        os.kill(self._processes[victim].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        others = [replica for replica in range(self._replicas) if replica != victim]
        self._wait(STALL_S, "a step without the lost group", lambda: all(self._steps_after(r, at, 3) for r in others))
        gaps = [self._longest(replica, at - step_s, self._now(replica)) for replica in others]
        found = {"stall_s": max(gaps) - step_s, "step_s": step_s}
        if kind == "hang":
            self._processes[victim].kill()
            self._processes[victim].wait()
        self._wait(BACK_S, "the lost group back", lambda: self._steps_after(victim, at, 1))
        back = next(row["wall"] for row in self._rows(victim) if row["wall"] > at and row["committed"])
        self._wait(STALL_S, "steps with it", lambda: all(self._steps_after(r, back, 5) for r in others))
        # If the group comes back in the very step that ends the stall, that wait counts only for the fault.
        rejoin = max(self._longest(r, max(back - 2.0, self._over(r, at)), back + 10 * step_s + 1.0) for r in others)
        if kind == "kill":
            found |= {"back_s": back - at, "rejoin_stall_s": rejoin - step_s}
        return found

    def close(self) -> None:
        for process in [*self._processes.values(), self._lighthouse]:
            if process is not None:
                process.kill()
                process.wait()

    def _begin(self, replica: int) -> None:
        settings = {"replica": replica, "lighthouse": self._address, "folder": str(self._folder), **self._way.__dict__}
        with (self._folder / f"{replica}.log").open("a") as log:
            self._processes[replica] = self._spawn(["--worker", json.dumps(settings)], stdout=log, stderr=log)

    def _spawn(self, words: list[str], **streams) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([self._python, "-W", "ignore", __file__, *words], env=environment, text=True, **streams)

    def _rows(self, replica: int) -> list[dict]:
        """Return all rows that the group has written so far; read only the new ones from the file."""
        path, rows = self._folder / f"{replica}.jsonl", self._read.setdefault(replica, [])
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offsets.get(replica, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[replica] = self._offsets.get(replica, 0) + len(whole + newline)
            rows += [json.loads(line) for line in whole.splitlines()]
        return rows

    def _now(self, replica: int) -> float:
        return self._rows(replica)[-1]["wall"]

    def _settled(self) -> float | None:
        """Return the usual step time once all groups have run some steps together; None before."""
        last = [self._rows(replica)[-_SETTLED_STEPS:] for replica in range(self._replicas)]
        if any(len(rows) < _SETTLED_STEPS or {row["members"] for row in rows} != {self._replicas} for rows in last):
            return None
        if any(time.monotonic() - rows[-1]["wall"] > 1.0 for rows in last):
            return None
        return statistics.median(b["wall"] - a["wall"] for rows in last for a, b in pairwise(rows))

    def _steps_after(self, replica: int, at: float, number: int) -> bool:
        rows = self._rows(replica)[-1000:]
        return sum(row["wall"] > at and row["committed"] for row in rows) >= number

    def _longest(self, replica: int, begin: float, end: float) -> float:
        """Return the longest time without a committed step that overlaps the given interval."""
        walls = [row["wall"] for row in self._rows(replica) if row["committed"]]
        return max((b - a for a, b in pairwise(walls) if b > begin and a < end), default=0.0)

    def _over(self, replica: int, at: float) -> float:
        """Return when the longest wait that overlaps the second after the fault ended."""
        walls = [row["wall"] for row in self._rows(replica) if row["committed"]]
        waits = [(b - a, b) for a, b in pairwise(walls) if b > at and a < at + 1.0]
        return max(waits)[1] if waits else at

    def _wait(self, limit_s: float, what: str, is_there) -> None:
        deadline = time.monotonic() + limit_s
        while not is_there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {limit_s:g} s")
            for replica, process in list(self._processes.items()):
                if process.poll() is not None:
                    self._begin(replica)
            time.sleep(0.05)


# --- in torchft's environment -----------------------------------------------------------------------------------------


def lighthouse(settings: dict) -> None:
    from torchft.coordination import LighthouseServer

    tuned = {} if settings["heartbeat_s"] is None else {"heartbeat_timeout_ms": int(1000 * settings["heartbeat_s"])}
    join_ms = int(1000 * settings["join_s"])
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=join_ms, **tuned)
    print(f"http://127.0.0.1:{server.address().rpartition(':')[2]}", flush=True)
    signal.pause()


def worker(settings: dict) -> None:
    """Run a replica group of one rank: it trains until it is killed."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limit = {} if settings["timeout_s"] is None else {"timeout": timedelta(seconds=settings["timeout_s"])}
    manager = Manager(
        pg=ProcessGroupGloo(**limit),
        load_state_dict=lambda state: (model.load_state_dict(state[0]), optimizer.load_state_dict(state[1])),
        state_dict=lambda: (model.state_dict(), optimizer.state_dict()),
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=settings["lighthouse"],
        replica_id=f"replica{settings['replica']}_",
        hostname="127.0.0.1",
        **limit,
    )
    whole, careful = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    places = torch.arange(SEQ).expand(MICRO_BATCH, SEQ)
    with (Path(settings["folder"]) / f"{settings['replica']}.jsonl").open("a") as file:
        while True:
            before = manager.current_step()
            rows = torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1))
            careful.zero_grad()
            loss = whole(rows[:, :-1].contiguous(), places, None, labels=rows[:, 1:].contiguous()).mean()
            loss.backward()
            careful.step()
            committed = manager.current_step() > before
            row = {"wall": time.monotonic(), "members": manager.num_participants(), "committed": committed}
            file.write(json.dumps(row) + "\n")
            file.flush()


def _model():
    import torch.distributed as dist

    from megatron import patches

    patches.apply()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="rope", share_embeddings_and_output_weights=False)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of an environment with torchft-nightly")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--kind", default="kill", choices=["kill", "hang"])
    parser.add_argument("--tuned", action="store_true", help="heartbeat timeout 1 s, timeout 5 s, join timeout 0.1 s")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        worker(json.loads(given.worker))
    elif given.lighthouse:
        lighthouse(json.loads(given.lighthouse))
    else:
        way = TUNED if given.tuned else DEFAULTS
        found = measure(given.python, given.replicas, given.faults, given.kind, way)
        head = {"bench": "hsdp_recovery", "system": "torchft", "way": way.name, "kind": given.kind}
        print(json.dumps(head | {"replicas": given.replicas, "faults": given.faults} | found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
