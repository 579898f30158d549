"""Workers of one process that hold snapshots for each other, and a proxy that alters the traffic between them."""

import contextlib
import socket
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
    """Workers of one process: their servers, snapshots and live states."""

    def __init__(self, networks: Networks, world: int, copies: int = 1, patience_s: float = 10, timeout_s: float = 10):
        self.world, self.networks = world, networks
        self.servers = [SnapshotServer(networks.of(rank), patience_s=patience_s) for rank in range(world)]
        self.snaps = [
            Snapshots(server, rank=r, peers=[(r + d + 1) % world for d in range(copies)], timeout_s=timeout_s)
            for r, server in enumerate(self.servers)
        ]
        self.live = [state(0) for _ in range(world)]
        self.addresses = {r: server.address for r, server in enumerate(self.servers)}
        self.place()

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


class Proxy:
    """A proxy between a worker and its peer. ``spoil(connections, total, data)`` returns what to pass; None: cut."""

    def __init__(self, network, target: str, spoil):
        self._network = network
        self._spoil, self._target, self.connections, self._open = spoil, target, 0, []
        self._listener, self.address = network.listen()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self._open):
            each.close()

    def _accept(self):
        threads = []
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = self._network.dial(self._target, 10)
                far.settimeout(None)
                self._open += [near, far]
                threads += [threading.Thread(target=self._pump, args=pair) for pair in ((near, far), (far, near))]
                for thread in threads[-2:]:
                    thread.start()
        for thread in threads:
            thread.join()

    def _pump(self, source, sink):
        total, forth = 0, source in self._open[::2]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                data = self._spoil(self.connections, total, data) if forth else data
                if data is None:
                    break
                total += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def crews(networks: Networks):
    """Yield a function that makes crews on ``networks``; close them, and check that no thread is left."""
    made, before = [], threading.active_count()

    def make(*args, **kwargs):
        made.append(Crew(networks, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert threading.active_count() == before, threading.enumerate()
