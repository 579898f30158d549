"""The handshake of connections: who knows the token is let in, whatever else is said to either end."""

import itertools
import random
import socket
import threading
import time
from contextlib import closing

import pytest

from ft.net.handshake import (
    CHALLENGE_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    HandshakeRefused,
    NotAMember,
    Party,
    accept,
    dial,
)

TOKEN, PURPOSE, LIMIT_S = "the token of this run", "ft-test-1", 30.0


def ends(token: str = TOKEN, purpose: str = PURPOSE) -> tuple[Party, Party]:
    """A dialer, and an acceptor that knows the token."""
    return Party(token, purpose, is_dialer=True), Party(TOKEN, PURPOSE, is_dialer=False)


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def answer(connection: socket.socket, party: Party | None = None, limit_s: float = LIMIT_S) -> bytes:
    """Do the acceptor's part; return the dialer's message."""
    party = party or Party(TOKEN, PURPOSE, is_dialer=False)
    theirs, message = accept(connection, party, limit_s, 4, 4)
    connection.sendall(party.seal(theirs, b"pong"))
    return message


@pytest.mark.parametrize("change", [{"token": "another"}, {"token": ""}, {"purpose": "ft-test-2"}])
def test_a_proof_for_another_run_or_another_protocol_is_wrong(change):
    dialer, acceptor = ends(**change)
    assert acceptor.open(dialer.challenge, dialer.seal(acceptor.challenge)) is None
    assert dialer.open(acceptor.challenge, acceptor.seal(dialer.challenge)) is None


def test_what_an_end_has_said_itself_proves_nothing_to_it():
    for party in ends():
        for theirs in (party.challenge, bytes(CHALLENGE_BYTES)):
            assert party.open(theirs, party.seal(theirs)) is None


def test_two_dialers_or_two_acceptors_do_not_convince_each_other():
    for role in (True, False):
        one, other = Party(TOKEN, PURPOSE, role), Party(TOKEN, PURPOSE, role)
        assert one.challenge != other.challenge
        assert one.open(other.challenge, other.seal(one.challenge)) is None


def test_no_part_of_a_proof_is_enough_and_it_counts_for_its_message_only():
    dialer, acceptor = ends()
    sealed = dialer.seal(acceptor.challenge, b"ab")
    assert acceptor.open(dialer.challenge, sealed) == b"ab"
    for length in range(len(sealed)):
        assert acceptor.open(dialer.challenge, sealed[:length]) is None
    for place, bit in itertools.product(range(len(sealed)), range(8)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1 << bit]) + sealed[place + 1 :]
        assert acceptor.open(dialer.challenge, changed) is None
    assert acceptor.open(dialer.challenge, Party.REFUSAL) is None
    assert acceptor.open(bytes(CHALLENGE_BYTES - 1), sealed) is None


def test_the_token_is_not_in_the_text_of_a_party():
    assert TOKEN not in repr(ends())


def test_members_meet_and_hear_each_other(pair, aside):
    near, far = pair
    far.settimeout(7.0)
    accepting = aside(answer, far)
    assert dial(near, ends()[0], LIMIT_S, b"ping", 4)[1] == b"pong"
    assert accepting.result(LIMIT_S) == b"ping"
    assert (near.gettimeout(), far.gettimeout()) == (None, 7.0)


def test_another_token_is_refused_by_name_at_both_ends(pair, aside):
    near, far = pair
    accepting = aside(answer, far)
    with pytest.raises(HandshakeRefused, match="the token is not that of this run"):
        dial(near, ends("another")[0], LIMIT_S, b"ping", 4)
    assert isinstance(accepting.exception(LIMIT_S), HandshakeRefused)


def test_another_protocol_is_named(pair, aside):
    near, far = pair
    accepting = aside(answer, far)
    with pytest.raises(NotAMember, match="ft-test-1"):
        dial(near, ends(purpose="ft-test-2")[0], LIMIT_S, b"ping", 4)
    near.close()
    assert isinstance(accepting.exception(LIMIT_S), ConnectionError)


def test_an_acceptor_without_the_token_is_found_out(pair):
    near, far = pair

    def pose() -> None:
        posing = Party("a guess", PURPOSE, is_dialer=False)
        far.sendall(posing.greeting())
        said = far.recv(1000)
        far.sendall(posing.seal(posing.read_greeting(said[:GREETING_BYTES]), b"pong"))

    threading.Thread(target=pose, daemon=True).start()
    with pytest.raises(NotAMember, match="does not prove"):
        dial(near, ends()[0], LIMIT_S, b"ping", 4)


def test_a_mirror_convinces_neither_end(pair, aside):
    near, far = pair

    def reflect() -> None:
        greeting = Party("a guess", PURPOSE, is_dialer=False).greeting()
        far.sendall(greeting)
        said = far.recv(1000)
        far.sendall(said[GREETING_BYTES:])

    threading.Thread(target=reflect, daemon=True).start()
    with pytest.raises(NotAMember):
        dial(near, ends()[0], LIMIT_S, b"ping", 4)
    left, right = socket.socketpair()
    with left, right:
        accepting = aside(answer, right)
        greeting = left.recv(1000)
        left.sendall(greeting + b"ping" + bytes(PROOF_BYTES))
        assert isinstance(accepting.exception(LIMIT_S), HandshakeRefused)


class Recorder:
    """Passes on what two members say to each other; ``said``: by each of them, as it went by."""

    def __init__(self, near: socket.socket, far: socket.socket):
        self.said = {near: b"", far: b""}
        ways = ((near, far), (far, near))
        self._threads = [threading.Thread(target=self._pass_on, args=way, daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop passing on, before anybody closes the sockets."""
        for tap in self.said:
            tap.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1000):
            self.said[source] += data
            sink.sendall(data)


def test_a_replayed_transcript_convinces_neither_end_and_has_no_token_in_it(aside):
    (near, near_tap), (far, far_tap) = socket.socketpair(), socket.socketpair()
    with near, far, near_tap, far_tap:
        recorder, accepting = Recorder(near_tap, far_tap), aside(answer, far)
        dial(near, ends()[0], LIMIT_S, b"ping", 4)
        assert accepting.result(LIMIT_S) == b"ping"
        recorder.end()
        of_dialer, of_acceptor = recorder.said[near_tap], recorder.said[far_tap]
    assert TOKEN.encode() not in of_dialer + of_acceptor
    assert len(of_dialer + of_acceptor) == 2 * (GREETING_BYTES + 4 + PROOF_BYTES)
    left, right = socket.socketpair()
    with left, right:
        accepting = aside(answer, right)
        left.sendall(of_dialer)
        assert isinstance(accepting.exception(LIMIT_S), HandshakeRefused)
    left, right = socket.socketpair()
    with left, right, pytest.raises(NotAMember):
        left.sendall(of_acceptor)
        dial(right, ends()[0], LIMIT_S, b"ping", 4)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 31, 32, 35, 36, GREETING_BYTES + 4 + PROOF_BYTES - 1])
def test_what_is_cut_off_lets_nobody_in(cut, pair, aside):
    near, far = pair
    dialer, acceptor = ends()
    accepting = aside(answer, far, acceptor)
    near.sendall((dialer.greeting() + dialer.seal(acceptor.challenge, b"ping"))[:cut])
    near.shutdown(socket.SHUT_WR)
    assert isinstance(accepting.exception(LIMIT_S), ConnectionError)


def test_garbage_never_lets_anybody_in(seed, aside):
    rng = random.Random(seed)
    label = Party("", PURPOSE, is_dialer=True).label
    for _ in range(200):
        near, far = socket.socketpair()
        with near, far:
            accepting = aside(answer, far)
            near.sendall(rng.choice([b"", label]) + rng.randbytes(rng.randrange(200)))
            near.shutdown(socket.SHUT_WR)
            assert isinstance(accepting.exception(LIMIT_S), ConnectionError | HandshakeRefused)


def test_the_limit_is_for_all_of_it_and_not_for_each_byte(pair, aside):
    near, far = pair
    accepting, began = aside(answer, far, None, 0.4), time.monotonic()
    label = Party("", PURPOSE, is_dialer=True).label
    with closing(near):
        for letter in itertools.chain(label, itertools.repeat(0)):
            if accepting.done():
                break
            near.sendall(bytes([letter]))
            time.sleep(0.05)
    assert isinstance(accepting.exception(LIMIT_S), TimeoutError) and time.monotonic() - began < LIMIT_S


def test_a_silent_acceptor_is_given_up(pair):
    with pytest.raises(TimeoutError):
        dial(pair[0], ends()[0], 0.1)
