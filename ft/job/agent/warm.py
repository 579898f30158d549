"""The warm pool: a process that has imported what workers need and forks them when the agent asks.

It runs one thread and touches no device, or its children could use neither. A worker is forked twice, so that its
parent is gone and the agent, which adopts orphans, becomes its parent: it sees the worker's exit at once. When the
agent dies, the pool kills all that its workers have started, then itself.

Lines in: ``{"fork": {"worker", "log", "env"}}``, ``{"guard": [pid, ...]}``, ``{"forget": pid}``. Lines out: ``{"ready":
seconds}``, ``{"worker", "pid"}``, ``{"note": text}``. Started by :mod:`ft.job.agent.pool`.
"""

import json
import os
import signal
import socket
import sys
import time

from ft.job.agent import ending, preload, script
from ft.platform import processes

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Pool:
    """The pool's side of the conversation.

    Args:
        sock: to the agent. agent: its pid. config: {"target", "is_module", "args", "preload"}.
    """

    def __init__(self, sock: socket.socket, agent: int, config: dict):
        self._sock, self._agent, self.config = sock, agent, config
        self._reader = sock.makefile("rb")
        self._sessions: set[int] = set()

    def say(self, **message) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def keep_open(self) -> int:
        """The socket's fd, which now survives an exec."""
        self._sock.set_inheritable(True)
        return self._sock.fileno()

    def serve(self) -> None:
        """Forks on demand; returns only in a new worker. With the end of the agent, everything ends."""
        try:
            for line in self._reader:
                message = json.loads(line)
                if "fork" in message:
                    if self._fork(**message["fork"]):
                        return
                elif "guard" in message:
                    self._sessions.update(message["guard"])
                else:
                    self._sessions.discard(message["forget"])
        except OSError:
            pass
        self._bury()

    def _fork(self, worker: str, log: str, env: dict[str, str]) -> bool:
        """Whether this is the new worker."""
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            os.close(read)
            os.close(write)
            self._reader.close()
            self._sock.close()
            processes.set_name(worker)
            script.become_worker(between, self._agent, log, env)
            return True
        os.close(write)
        pid = int(os.read(read, 32))
        os.close(read)
        os.waitpid(between, 0)
        self._sessions.add(pid)
        self.say(worker=worker, pid=pid)
        return False

    def _bury(self) -> None:
        """The agent's death kills the workers; their helper processes know nothing of it."""
        for pid in processes.members(self._sessions):
            processes.send(pid, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    """Entry of the pool's process: ``sys.argv[1:]`` is (folder to import ft from, socket's fd, agent's pid, config)."""
    started = time.monotonic()
    root, fd, agent, text = sys.argv[1:]
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(agent):
        os._exit(0)
    for signum in (signal.SIGINT, signal.SIGTERM):  # meant for the agent, which passes on what workers shall hear
        signal.signal(signum, signal.SIG_IGN)
    config = json.loads(text)
    pool = Pool(socket.socket(fileno=int(fd)), int(agent), config)
    sys.path[:] = script.search_path(config["target"], config["is_module"], _interpreter_path(root))
    sys.argv = [config["target"], *config["args"]]
    own = {} if _NVML_CHECK in os.environ else {_NVML_CHECK: "1"}  # else counting GPUs makes CUDA unusable in forks
    os.environ.update(own)
    _preload(pool, root, agent)
    for name in own:
        del os.environ[name]
    processes.die_with_parent(0)  # from here on the end of the socket says it, and there is something to do then
    if os.getppid() != int(agent):
        os._exit(0)
    processes.set_name("ft-pool")
    pool.say(ready=round(time.monotonic() - started, 3))
    pool.serve()
    ending.leave(script.run(config["target"], config["is_module"], config["args"]))


def _interpreter_path(root: str) -> list[str]:
    """``sys.path`` without the entry for this start, but with the folder that ``ft`` comes from."""
    rest = sys.path[1:]
    return rest if root in rest else [root, *rest]


def _preload(pool: Pool, root: str, agent: str) -> None:
    """Imports; a module that makes forking impossible is left out, for which the process has to start again."""
    config = pool.config
    skip = set(config.get("skip", []))
    names = preload.plan(config["target"], config["is_module"], config["preload"])
    try:
        preload.load(names, skip)
    except preload.UnfitForForking as error:
        pool.say(note=f"warm pool: {error}; workers will import it themselves")
        again = json.dumps({**config, "skip": sorted(skip | {error.module})})
        fd = str(pool.keep_open())
        os.execv(sys.executable, [sys.executable, "-c", BOOT, root, fd, agent, again])


BOOT = "import sys; sys.path[0] = sys.argv[1]; from ft.job.agent.warm import main; main()"
"""What ``python -c`` runs to become the pool: ``ft`` comes from the same folder as the agent's."""
