"""Catch-up under faults: sources that die, stop, lie or change; strangers at the door. No wrong state is accepted."""

import contextlib
import random
import signal
import socket
import threading
import time

import pytest
import torch
from fetch_sources import (
    LINEAGE,
    STEP,
    TOKEN,
    WAIT_S,
    Process,
    blank,
    equal,
    once_past,
    state,
)
from proxies import Proxy
from waiting import eventually

from ft.net import listener as door
from ft.net.framed import HEAD_BYTES
from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, Party
from ft.state.fetch import BadState, FetchRefused, StateServer, fetch
from ft.state.transfer import ASK, PURPOSE, RANGE, WORDS

HEADS = 4096
"""Bytes by which a connection has surely begun to carry the state: more than all heads and the table."""


def opened(closing, thing):
    closing.callback(thing.close)
    return thing


def serving(closing, live, step=STEP) -> StateServer:
    server = opened(closing, StateServer("127.0.0.1", TOKEN))
    server.offer(step, LINEAGE, live, {})
    return server


class Gate:
    """An ``answer`` for a :class:`Proxy` that holds the bytes behind the first ``past`` ones up until it is opened."""

    def __init__(self, past: int = HEADS):
        self._past, self.reached, self.opened = past, threading.Event(), threading.Event()

    def __call__(self, data: bytes, before: int) -> bytes:
        if before > self._past:
            self.reached.set()
            self.opened.wait(WAIT_S)
        return data


def get(sources, into, step=STEP, limit_s=WAIT_S, stall_s=WAIT_S):
    return fetch([s.address for s in sources], TOKEN, step, LINEAGE, into, limit_s, stall_s=stall_s)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_share_of_a_source_that_is_killed_or_stopped_in_the_middle_comes_from_the_others(closing, number):
    live = state(11, 24)
    doomed, good = (opened(closing, Process(live)) for _ in range(2))
    gate = Gate()
    once = once_past(2 << 20, lambda: (doomed.signal(number), gate.opened.set()))
    middle, later = opened(closing, Proxy(doomed.address, once)), opened(closing, Proxy(good.address, gate))
    into = blank(live)
    found = get([middle, later], into, stall_s=WAIT_S if number == signal.SIGKILL else 15.0)
    assert equal(live, into)
    assert middle.address in found.left
    assert found.per_source[later.address] > found.per_source[middle.address]


def test_the_last_source_that_stops_ends_the_fetch_within_the_limit(closing):
    live = state(12, 24)
    alone = opened(closing, Process(live))
    middle = opened(closing, Proxy(alone.address, once_past(2 << 20, lambda: alone.signal(signal.SIGSTOP))))
    with pytest.raises(FetchRefused, match=r"has sent nothing for|does not answer"):
        get([middle], blank(live), stall_s=0.5)
    with pytest.raises(FetchRefused, match=r"time is up|does not answer|sent nothing"):
        get([alone], blank(live), limit_s=0.5)


def test_a_source_that_trickles_is_left_for_another(closing):
    live = state(13, 24)
    good, slow = serving(closing, live), serving(closing, live)

    def trickle(data: bytes, before: int) -> bytes:
        if before > HEADS:
            time.sleep(0.5)
        return data

    middle = opened(closing, Proxy(slow.address, trickle))
    into = blank(live)
    found = get([middle, good], into, limit_s=120.0, stall_s=5.0)
    assert equal(live, into) and middle.address in found.left
    assert found.per_source[middle.address] < found.per_source[good.address]


def test_a_truncated_answer_is_no_state_wherever_it_ends(closing, seed):
    numbers, live = random.Random(seed), state(14, 1.2)
    source = serving(closing, live)
    for _ in range(20):
        end = numbers.randrange(1, 1 << 20)
        middle = opened(closing, Proxy(source.address, lambda data, before, end=end: _until(data, before, end)))
        with pytest.raises((FetchRefused, BadState)):
            get([middle], blank(live))
        middle.close()
    into = blank(live)
    get([source], into)
    assert equal(live, into)


def _until(data: bytes, before: int, end: int) -> bytes | None:
    return data[: end - before] if before < end else None


def test_flipped_bits_are_never_accepted_and_another_source_makes_good_for_them(closing, seed):
    numbers, live = random.Random(seed), state(15, 1.5)
    source, accepted = serving(closing, live), 0
    for turn in range(20):
        rate = numbers.choice([2e-7, 2e-6, 1e-5])
        middle = opened(closing, Proxy(source.address, _flipper(random.Random(seed + turn), rate)))
        into = blank(live)
        with contextlib.suppress(FetchRefused, BadState):
            get([middle], into, stall_s=15.0)
            assert equal(live, into)
            accepted += 1
        into = blank(live)
        get([middle, source], into, stall_s=15.0)
        assert equal(live, into)
        middle.close()
    print("undamaged", accepted)


def _flipper(numbers: random.Random, rate: float):
    """``rate``: damaged bytes / bytes."""

    def answer(data: bytes, before: int) -> bytes:
        changed = bytearray(data)
        at = int(numbers.expovariate(rate))
        while at < len(changed):
            changed[at] ^= 1 << numbers.randrange(8)
            at += 1 + int(numbers.expovariate(rate))
        return bytes(changed)

    return answer


def test_damage_in_every_copy_is_a_bad_state(closing):
    live = state(16, 1)
    source = serving(closing, live)

    def late_flip(data: bytes, before: int) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if before > 2 * HEADS else data

    middle = opened(closing, Proxy(source.address, late_flip))
    with pytest.raises(BadState, match=r"checksum|does not fit"):
        get([middle], blank(live))


def test_a_state_that_changes_right_after_its_withdrawal_is_never_seen_torn(closing, aside, seed):
    numbers, rounds = random.Random(seed), 60
    lives = [{"big": torch.zeros(2 << 20), "small": torch.zeros(100, 77)} for _ in range(2)]
    servers = [opened(closing, StateServer("127.0.0.1", TOKEN)) for _ in lives]
    over, seen = threading.Event(), {"whole": 0, "refused": 0}

    def fetcher() -> None:
        into, step = blank(lives[0]), 1
        while not over.is_set():
            step = max(step, at[0])
            try:
                fetch([s.address for s in servers], TOKEN, step, LINEAGE, into, WAIT_S, stall_s=WAIT_S, cancel=over)
            except FetchRefused:
                seen["refused"] += 1
                continue
            torn = [name for name, tensor in into.items() if not bool((tensor == step).all())]
            assert not torn, f"step {step}: {torn}"
            seen["whole"] += 1
            step += 1

    at = [0]
    fetching = aside(fetcher)
    try:
        for step in range(1, rounds + 1):
            for server, live in zip(servers, lives, strict=True):
                server.withdraw(numbers.choice([0.0, 0.0, 0.001]))
                for tensor in live.values():
                    tensor.fill_(step)
                server.offer(step, LINEAGE, live, {})
            at[0] = step
            time.sleep(numbers.random() * 0.02)
        eventually(lambda: seen["whole"] or fetching.done())  # the last step stays
    finally:
        over.set()
    fetching.result(WAIT_S)
    print(seen)
    assert seen["whole"]


def test_a_withdrawal_is_not_held_up_by_a_peer_that_does_not_read(closing, aside):
    live = state(17, 64)
    source, gate = serving(closing, live), Gate()
    fetching = aside(get, [opened(closing, Proxy(source.address, gate))], blank(live))
    assert gate.reached.wait(WAIT_S)
    assert source.under_way() == 1
    (cut,) = source.withdraw(0.05)
    for tensor in live.values():
        tensor.zero_()
    assert cut.sent < cut.nbytes and source.under_way() == 0
    gate.opened.set()
    with pytest.raises(FetchRefused):
        fetching.result(WAIT_S)


def test_a_withdrawal_waits_for_the_fetch_under_way_and_takes_no_new_one(closing, aside):
    live = state(18, 24)
    source, gate, into = serving(closing, live), Gate(), blank(live)
    fetching = aside(get, [opened(closing, Proxy(source.address, gate))], into)
    assert gate.reached.wait(WAIT_S)
    withdrawing = aside(source.withdraw, WAIT_S)
    with pytest.raises(FetchRefused):
        while True:  # until the withdrawal has begun
            get([source], blank(live))
    gate.opened.set()
    assert not withdrawing.result(WAIT_S)
    fetching.result(WAIT_S)
    assert equal(live, into)


def test_a_fetch_has_begun_once_every_source_that_can_be_reached_knows_of_it(closing, aside):
    live = state(20, 1)
    source, silent = serving(closing, live), opened(closing, socket.create_server(("127.0.0.1", 0)))
    gone = f"127.0.0.1:{silent.getsockname()[1]}"
    silent.close()
    gate, has_begun, into = Gate(past=0), threading.Event(), blank(live)  # behind the challenge
    sources = [gone, source.address, opened(closing, Proxy(source.address, gate)).address]
    fetching = aside(fetch, sources, TOKEN, STEP, LINEAGE, into, WAIT_S, has_begun=has_begun)
    assert gate.reached.wait(WAIT_S) and not has_begun.is_set()
    gate.opened.set()
    assert has_begun.wait(WAIT_S)
    fetching.result(WAIT_S)
    assert equal(live, into)


def test_strangers_neither_stop_a_fetch_nor_get_anything(closing, aside, capfd, seed):
    numbers, live = random.Random(seed), state(19, 2)
    source = serving(closing, live)
    over, got = threading.Event(), []

    def fetch_on() -> None:
        while not over.is_set():
            into = blank(live)
            get([source], into)
            got.append(equal(live, into))

    idle = [opened(closing, _connected(source)) for _ in range(door.MAX_CONNECTIONS + 10)]  # more than are let in
    fetching = aside(fetch_on)  # after them: whoever is no member yet is sent away by the next to come
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), _connected(source) as stranger:
                stranger.sendall(_mutated(numbers))
                stranger.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda s=stranger: s.recv(1 << 16), b""))
                assert len(answer) <= GREETING_BYTES + PROOF_BYTES and not answer[GREETING_BYTES:].strip(b"\0")
        some = len(got)
        eventually(lambda: len(got) >= some + 3)
    finally:
        over.set()
    fetching.result(WAIT_S)
    for one in idle:
        one.close()
    print("fetched", len(got))
    assert all(got) and len(got) >= 3
    lines = capfd.readouterr().err.splitlines()
    assert 0 < len([line for line in lines if "refused 127.0.0.1" in line]) <= 20
    assert "Traceback" not in "".join(lines)


def _connected(source: StateServer) -> socket.socket:
    host, port = source.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def _mutated(numbers: random.Random) -> bytes:
    """The handshake and a request as a member sends them, but for the proof, and then damaged."""
    greeting = Party("a guess", PURPOSE, is_dialer=True).greeting()
    frame = numbers.choice([ASK, RANGE, WORDS]) + numbers.randbytes(HEAD_BYTES + numbers.randrange(200))
    request = bytearray(greeting + numbers.randbytes(PROOF_BYTES) + frame)
    kind = numbers.randrange(5)
    if kind == 0:
        return numbers.randbytes(numbers.randrange(2000))
    if kind == 1:
        return bytes(request[: numbers.randrange(len(request))])
    if kind == 2:
        for _ in range(numbers.randrange(1, 30)):
            request[numbers.randrange(len(request))] = numbers.randrange(256)
    if kind == 3:
        return bytes(request * numbers.randrange(2, 6))
    return bytes(request)


def test_a_slow_stranger_is_shown_the_door(closing, monkeypatch):
    monkeypatch.setattr(door, "HELLO_S", 0.3)
    source = serving(closing, state(20, 0.1))
    with _connected(source) as stranger:
        with contextlib.suppress(OSError):
            for letter in Party("a guess", PURPOSE, is_dialer=True).greeting() * 20:
                stranger.sendall(bytes([letter]))  # never silent for long, never done
                time.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            assert len(b"".join(iter(lambda: stranger.recv(1 << 16), b""))) <= GREETING_BYTES


GREETING = Party("a guess", PURPOSE, is_dialer=False).greeting()
OTHERS = [
    b"",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    GREETING[:20],
    GREETING,
    GREETING + bytes(PROOF_BYTES),
    GREETING + b"\1" * PROOF_BYTES,
    GREETING + b"\1" * (PROOF_BYTES + HEAD_BYTES),
]


@pytest.mark.parametrize("answer", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_server_that_is_no_source_is_told_from_one_and_not_waited_for(closing, aside, answer, hangs_up):
    listener = opened(closing, socket.create_server(("127.0.0.1", 0)))

    def speak() -> None:
        visitor, _ = listener.accept()
        with visitor, contextlib.suppress(OSError):
            visitor.sendall(answer)
            if hangs_up:
                visitor.shutdown(socket.SHUT_WR)
            while visitor.recv(1 << 16):
                pass

    speaking = aside(speak)
    address, stall_s = f"127.0.0.1:{listener.getsockname()[1]}", WAIT_S if hangs_up else 0.3
    with pytest.raises((FetchRefused, BadState), match="cannot fetch the state of step 7") as found:
        fetch([address], TOKEN, STEP, LINEAGE, blank(state(22, 0.1)), WAIT_S, stall_s=stall_s)
    assert "the time is up" not in str(found.value)
    speaking.result(WAIT_S)
