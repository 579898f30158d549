"""Workers of one process that hold snapshots for each other."""

import contextlib
import threading

import torch
from networks import Networks

from ft.state.snapshot import Snapshots, SnapshotServer
from ft.state.snapshot.state import RankState

MIB = 1 << 20


def state(step: int, mib: float = 2.5, replicated: int = 100) -> RankState:
    """Return a state whose tensors and envelope depend on the step."""
    owned = {"big": torch.full((int(mib * MIB / 4),), float(step)), "step": torch.tensor(float(step))}
    rest = {"shared": torch.arange(replicated) + step} if replicated else {}
    return RankState(owned, rest, {"extra": {"at": step}}, {"rng": b"%d" % step})


def set_to(live: RankState, step: int) -> RankState:
    """Change ``live`` to the state after ``step``; the tensors remain the same objects."""
    for mine, other in zip(live.sections().values(), state(step).sections().values(), strict=True):
        for name, tensor in mine.items():
            tensor.copy_(other[name].flatten()[0] if name != "shared" else other[name])
    live.envelope, live.blobs = {"extra": {"at": step}}, {"rng": b"%d" % step}
    return live


def is_at(live: RankState, step: int) -> bool:
    return all(bool((t == step).all()) for t in live.owned.values()) and live.replicated["shared"][0].item() == step


class Crew:
    """Workers of one process: their servers, snapshots and live states, after ``steps``."""

    def __init__(self, networks: Networks, world: int, copies=1, patience_s=30.0, timeout_s=30.0, steps=()):
        self.world, self.networks = world, networks
        self.servers = [SnapshotServer(networks.of(rank), patience_s=patience_s) for rank in range(world)]
        self.snaps = [
            Snapshots(server, rank=r, peers=[(r + d + 1) % world for d in range(copies)], timeout_s=timeout_s)
            for r, server in enumerate(self.servers)
        ]
        self.live = [state(0) for _ in range(world)]
        self.addresses = {r: server.address for r, server in enumerate(self.servers)}
        self.place()
        for step in steps:
            self.step(step)

    def place(self):
        for snaps in self.snaps:
            snaps.place(self.addresses)

    def step(self, step: int, epoch: int = 0):
        for snaps, live in zip(self.snaps, self.live, strict=True):
            snaps.take(set_to(live, step), step, epoch)
        for snaps in self.snaps:
            snaps.wait()

    def close(self):
        for snaps, server in zip(self.snaps, self.servers, strict=True):
            snaps.close()
            server.close()


@contextlib.contextmanager
def crews(networks: Networks):
    """Yield a function that makes crews on ``networks``; close them, and check that no thread is left."""
    made, before = [], set(threading.enumerate())

    def make(*args, **kwargs):
        made.append(Crew(networks, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
    for left in set(threading.enumerate()) - before:
        left.join(30.0)
        assert not left.is_alive(), left
