"""The run's token never crosses a wire: all that the processes of a run send to each other is searched for it."""

import base64
import signal
import socket
import time

import ft_runs
import pytest
import replica_runs
from ft_runs import ft_run
from wire_capture import Recording, forms, found_in, need_root

from ft.base import events
from ft.base.errors import ENDED_EARLY
from ft.job.quorum.values import PURPOSE as QUORUM
from ft.net.store import PURPOSE as STORE
from ft.state.transfer import PURPOSE as TRANSFER
from ft.systems.hsdp.ring.connect import PURPOSE as RING

TOKEN = "0123456789abcdef" * 4
LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"


@pytest.fixture
def recording(tmp_path):
    need_root()
    recording = Recording(tmp_path / "packets")
    yield recording
    recording.end()
    recording.file.unlink(missing_ok=True)


def check(recording: Recording, token: str, protocols: tuple[str, ...]) -> None:
    """Everything was recorded, all ``protocols`` are in it, and the token is not."""
    recording.end()
    streams = recording.streams()
    print(f"{sum(map(len, streams.values())) / 1e6:.1f} MB in {len(streams)} directions of connections")
    assert recording.lost == 0
    assert found_in(streams, {name: name.encode() for name in protocols}).keys() == set(protocols)
    assert len(token) == 64 and found_in(streams, forms(token)) == {}


def test_a_run_with_a_swap(recording, corpus, tmp_path):
    wanted = ft_runs.flags(corpus, LAYOUT, steps=8)
    done = ft_run(tmp_path / "run", wanted, nproc=4, options="--inject kill@step=4:rank=2:phase=backward")
    assert done.code == 0 and len(done.named("fault_injected")) == 1, done.explain()
    check(recording, (tmp_path / "run" / "token").read_text(), (STORE, TRANSFER))


def test_a_run_with_replicas_of_which_one_returns(recording, corpus, tmp_path):
    wanted = replica_runs.flags(corpus, "--use-distributed-optimizer", steps=100_000)
    faults = "kill@replica=1:step=3:rank=0:phase=backward,slow@replica=0:step=2:rank=0:factor=6:for=300s"
    run = replica_runs.Replicas(tmp_path / "run", wanted, replicas=2, nproc=2, options=f"--inject {faults}")
    run.wait_for(lambda: replica_runs.Done(0, "", run.folder).of(1, events.CAUGHT_UP))
    run.process.send_signal(signal.SIGTERM)
    done = run.wait()
    assert done.code == ENDED_EARLY and done.injected(), done.explain()
    check(recording, (tmp_path / "run" / "token").read_text(), (STORE, RING, QUORUM, TRANSFER))


@pytest.mark.parametrize(
    "leak",
    [
        TOKEN.encode(),
        bytes.fromhex(TOKEN),
        TOKEN.encode().hex().encode(),
        base64.b64encode(b"FT " + TOKEN.encode()),
        base64.b64encode(b"FT: " + TOKEN.encode() + b"\n"),
        base64.urlsafe_b64encode(b"token" + bytes.fromhex(TOKEN) + b"."),
    ],
    ids=["text", "bytes", "hex", "base64", "base64 shifted", "base64 of bytes"],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_token_is_found_in_whatever_form_and_in_pieces(recording, leak, host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host} is no address here: {error}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as near, listener.accept()[0] as far:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in (b"before it, " + leak[:20], leak[20:30], leak[30:] + b" and behind it"):
            near.sendall(piece)
            far.recv(1000)
            time.sleep(0.01)
    recording.end()
    streams = recording.streams()
    assert recording.lost == 0 and found_in(streams, forms(TOKEN))
    assert found_in(streams, forms(TOKEN[::-1])) == {}
