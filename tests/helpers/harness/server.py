"""The warm server: it imports torch and megatron once, then forks the ranks of every call, and commands of ``ft``.

It has one thread and runs no parallel region; otherwise its children could not use OpenMP or gloo. It reaps all its
descendants, reports to the test which ranks ended and how, and ends all of them when the test process ends.
Run as ``python -m harness.server FD`` by :class:`harness.warm.Server`; FD is its end of the socket pair.
"""

import os
import select
import signal
import socket
import sys
import traceback

from harness import commands, processes, wire


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    test_process = os.getppid()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: _end_everything())
    processes.die_with_parent(signal.SIGTERM)
    if os.getppid() != test_process:
        os._exit(1)
    try:
        _import_everything()
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"the imports started {threads - 1} thread(s); ranks cannot be forked beside threads")
    except Exception:
        wire.send(sock, ("broken", traceback.format_exc()))
        raise
    wire.send(sock, ("ready", os.getpid()))
    _serve(sock)


def _import_everything() -> None:
    import contextlib
    import gc
    import importlib
    import pkgutil
    import warnings

    # Suppress the warnings of dependencies about optional packages.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.distributed")
        importlib.import_module("megatron.patches").apply()
        for name in (
            "torch._dynamo",  # every optimizer step imports it
            "megatron.core.models.gpt",
            "megatron.core.optimizer",
            "megatron.core.pipeline_parallel",
            "megatron.core.dist_checkpointing.strategies.torch",
            "megatron.core.datasets.gpt_dataset",
        ):
            importlib.import_module(name)
        training = importlib.import_module("megatron.ft_trainer")
        for module in pkgutil.walk_packages(training.__path__, "megatron.ft_trainer.", onerror=lambda name: None):
            # A rank that needs a broken module gets the same error, in its own test.
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
    importlib.import_module("megatron.ft_trainer.arguments").all_flags()  # the ranks inherit the parser
    for package in ("ft.commands", "ft.job", "ft.systems", "ft.worker"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # of an optional package
                    importlib.import_module(module.name)
    commands.interpreter_path()
    importlib.import_module("encodings.idna")  # the first host name lookup imports it
    gc.collect()
    gc.freeze()


def _serve(sock: socket.socket) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([sock, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        for pid, status in processes.ended_children():
            wire.send(sock, ("exit", pid, os.waitstatus_to_exitcode(status)))
        if sock in readable:
            try:
                request = wire.receive(sock)
            except (EOFError, ConnectionError):
                _end_everything()
            if "words" in request:
                _fork_keeper(request, sock)
            else:
                wire.send(sock, ("started", _fork_ranks(request, [sock.fileno(), wake_read, wake_write])))


def _fork_keeper(request: dict, sock: socket.socket) -> None:
    """Fork the keeper of a command (:mod:`harness.commands`), which receives more descriptors from the test."""
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 3)
    report, output, network = [*descriptors, None][:3]
    server = os.getpid()
    if os.fork() == 0:
        try:
            sock.close()
            processes.die_with_parent(signal.SIGKILL)
            if os.getppid() == server:
                commands.keep(request, socket.socket(fileno=report), output, network)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)


def _fork_ranks(request: dict, private_fds: list[int]) -> list[int]:
    held = socket.socket()  # open in the ranks until they end: otherwise a connection of anybody could take the port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does that listens there
    held.bind(("127.0.0.1", 0))
    port, server, pids = held.getsockname()[1], os.getpid(), []
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for fd in private_fds:
                    os.close(fd)
                from harness import rank as this_rank

                status = this_rank.main(request, rank, port, server)
            finally:
                os._exit(status)
        pids.append(pid)
    held.close()
    return pids


def _end_everything() -> None:
    processes.end(processes.members((), {os.getpid()}))
    os._exit(0)


if __name__ == "__main__":
    main()
