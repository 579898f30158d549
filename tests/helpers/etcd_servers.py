"""etcd servers for tests, on free ports of this machine; they can be killed, stopped and started again."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from waiting import eventually

from ft.platform.network import free_port

_FAST = "--unsafe-no-fsync --heartbeat-interval 50 --election-timeout 2000 --logger zap --log-outputs stderr"
_UP_S = 60.0


@pytest.fixture
def etcd(tmp_path):
    """Yield a function ``etcd(members)`` that starts servers; they end with the test."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    started: list[Servers] = []

    def start(members: int = 1) -> Servers:
        started.append(Servers(tmp_path / f"etcd{len(started)}", members))
        return started[-1]

    yield start
    for servers in started:
        servers.end()


class Servers:
    """An etcd cluster of several members, numbered from 0.

    Attributes:
        ports: client port of each member.
    """

    def __init__(self, folder: Path, members: int):
        folder.mkdir()
        self._folder = folder
        self.ports, self._peers = ([free_port("127.0.0.1") for _ in range(members)] for _ in range(2))
        self._processes: dict[int, subprocess.Popen] = {}
        for member in range(members):
            self.start(member)
        try:
            self.wait()
        except BaseException:
            self.end()
            raise

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, member: int) -> None:
        """Start a member, or start it again with its data."""
        peers = {f"m{i}": f"http://127.0.0.1:{port}" for i, port in enumerate(self._peers)}
        client, peer = f"http://127.0.0.1:{self.ports[member]}", peers[f"m{member}"]
        command = ["etcd", "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"), *_FAST.split()]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", ",".join(f"{name}={url}" for name, url in peers.items())]
        with open(self._folder / f"m{member}.log", "ab") as log:
            self._processes[member] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)

    def wait(self) -> None:
        """Wait until every running member serves requests and has a leader."""
        deadline = time.monotonic() + _UP_S
        for member in self._processes:
            while self.ask(member, "kv/range", {"key": "eA=="}).get("header") is None:
                if time.monotonic() > deadline:
                    log = (self._folder / f"m{member}.log").read_text()[-2000:]
                    raise AssertionError(f"etcd is not up after {_UP_S} s:\n{log}")
                time.sleep(0.02)

    def kill(self, member: int) -> None:
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def stop(self, member: int) -> None:
        os.kill(self._processes[member].pid, signal.SIGSTOP)

    def go_on(self, member: int) -> None:
        os.kill(self._processes[member].pid, signal.SIGCONT)

    def leader(self) -> int:
        """Return the member that leads; on a busy machine, an election may be under way."""
        leads = eventually(lambda: [member for member in self._processes if self._leads(member)], "etcd has no leader")
        return leads[0]

    def _leads(self, member: int) -> bool:
        status = self.ask(member, "maintenance/status", {})
        return status.get("leader", "0") != "0" and status["leader"] == status["header"]["member_id"]

    def ask(self, member: int, path: str, body: dict) -> dict:
        """Send one request to one member; return {} if it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[member], timeout=5)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body))
            return json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return {}
        finally:
            connection.close()

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
