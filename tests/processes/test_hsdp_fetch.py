"""Catch-up: a state goes from the ranks that have it to the one that is behind."""

import contextlib
import socket
import threading
import time

import pytest
import torch
from fetch_sources import LINEAGE, STEP, TOKEN, WAIT_S, blank, equal, state
from waiting import eventually

from ft.base.errors import UserError
from ft.net.framed import FramedChannel, Mark
from ft.state.fetch import BadState, FetchRefused, StateServer, fetch, fetch_envelope, shares
from ft.state.fetch.server import StateOffer
from ft.state.layout import FlatState, table_of
from ft.state.transfer import Withdrawn

MARK = Mark(0, STEP, LINEAGE)


@pytest.fixture
def servers(closing):
    """Return a function that makes a server."""
    return lambda **whose: closing.enter_context(contextlib.closing(StateServer("127.0.0.1", TOKEN, **whose)))


@pytest.fixture
def serving(servers):
    """Return a function that makes a server which offers a state."""

    def offering(live, envelope=(), **whose):
        source = servers(**whose)
        source.offer(STEP, LINEAGE, live, dict(envelope))
        return source

    return offering


def get(sources, into, *, step=STEP, lineage=LINEAGE, token=TOKEN, limit_s=WAIT_S, stall_s=WAIT_S, **more):
    addresses = [getattr(s, "address", s) for s in sources]
    return fetch(addresses, token, step, lineage, into, limit_s, stall_s=stall_s, **more)


def test_shares_are_even_by_bytes_and_cover_everything_once():
    for nbytes in (0, 1, 63, 64, 1000, 5 << 20, (300 << 20) + 7):
        for count in (1, 2, 3, 7):
            cut = shares.cut(nbytes, [str(i) for i in range(count)])
            pieces = [piece for share in cut.values() for piece in share]
            assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces)][: len(pieces)]
            assert sum(map(len, pieces)) == nbytes and (not pieces or pieces[-1].stop == nbytes)
            lengths = [sum(map(len, share)) for share in cut.values()]
            assert max(lengths) - min(lengths) <= 128


def test_any_range_of_the_layout_is_read_and_written_as_one_run_of_bytes():
    source, target = state(1, 0.1), blank(state(1, 0.1))
    here, there = FlatState(source), FlatState(target)
    length, at = here.table.nbytes, 0
    while at < length:
        stop = min(length, at + 40961)
        whole, scratch = here.whole(at, stop), memoryview(bytearray(stop - at))
        here.gather(at, stop, scratch)
        assert whole is None or bytes(whole) == bytes(scratch)
        there.scatter(at, stop, scratch)
        at = stop
    assert equal(source, target)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fetched_state_is_the_same_bit_for_bit_and_comes_evenly_from_all(serving, count):
    live = state(2, 13.7)
    sources = [serving(live, {"rng": [1, 2], "name": "ü"}, replica=i, rank=5) for i in range(count)]
    into = blank(live)
    found = get(sources, into, rank=5)
    assert equal(live, into)
    assert found.envelope == {"rng": [1, 2], "name": "ü"} and not found.left
    assert sum(found.per_source.values()) == found.bytes == FlatState(live).table.nbytes
    lengths = found.per_source.values()
    assert max(lengths) - min(lengths) <= 128 or found.seconds > 0.25  # from then on the slower one is helped


def test_names_decide_and_not_the_order_of_the_tensors(serving):
    live = state(3, 0.1)
    into = dict(reversed(blank(live).items()))
    get([serving(live)], into)
    assert equal(live, into)


def test_a_state_without_a_byte_still_has_its_envelope(serving):
    source = serving({"none": torch.zeros(0, 3)}, {"k": 1})
    found = get([source], {"none": torch.zeros(0, 3)})
    assert found.envelope == {"k": 1} and found.bytes == 0
    source.offer(STEP, LINEAGE, {}, {"k": 2})
    assert get([source], {}).envelope == {"k": 2}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"lineage": LINEAGE + 1}, FetchRefused, "lineage 4; on offer"),
        ({"token": "another"}, FetchRefused, "another token"),
        ({"rank": 1}, BadState, r"serves logical rank 5 of replica 2, Mark\(rank=5.* instead of Mark\(rank=1"),
    ],
)
def test_another_state_than_the_one_asked_for_is_refused(serving, change, kind, words):
    live = state(4, 0.1)
    source = serving(live, replica=2, rank=5)
    with pytest.raises(kind, match=words):
        get([source], blank(live), **change)
    eventually(lambda: source.under_way() == 0)
    get([source], blank(live))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("matrix", torch.zeros(1021, 33, dtype=torch.bfloat16), r"matrix bfloat16\[33, 1021\] against"),
        ("matrix", torch.zeros(33, 1021, dtype=torch.float16), "against matrix float16"),
        ("matrix", None, "11 tensors against 10"),
        ("more", torch.zeros(1), "11 tensors against 12"),
    ],
)
def test_other_tensors_are_a_bad_state(serving, name, tensor, words):
    live = state(5, 0.1)
    source, into = serving(live), blank(live) | {name: tensor}
    with pytest.raises(BadState, match=words):
        get([source], {key: value for key, value in into.items() if value is not None})


def test_tensors_that_are_no_run_of_bytes_are_refused_where_they_are_given(servers):
    live = {"matrix": torch.zeros(4, 6).t()}
    with pytest.raises(UserError, match=r"'matrix' of shape .6, 4. is not contiguous"):
        servers().offer(STEP, LINEAGE, live, {})
    with pytest.raises(UserError, match="not contiguous"):
        get(["127.0.0.1:1"], live)
    with pytest.raises(UserError, match="complex64"):
        servers().offer(STEP, LINEAGE, {"wave": torch.zeros(2, dtype=torch.complex64)}, {})


def test_a_source_with_another_state_is_left_for_one_that_has_the_right_one(serving):
    live = state(6, 3)
    right, later, other = serving(live), serving(live), serving({"weight": torch.zeros(1)})
    later.offer(STEP + 1, LINEAGE, live, {})
    into = blank(live)
    found = get([later, other, right, "127.0.0.1:1"], into)
    assert equal(live, into)
    assert found.per_source[right.address] == found.bytes
    assert "step 8" in found.left[later.address] and "other tensors" in found.left[other.address]
    assert "ConnectionRefused" in found.left["127.0.0.1:1"]


def test_a_state_is_withdrawn_for_the_next_one_or_alone_and_then_its_envelope_is_still_served(servers):
    live = state(7, 0.1)
    source = servers()
    source.offer(STEP - 1, LINEAGE, live, {})
    source.offer(STEP, LINEAGE, live, {"at": "end"})
    with pytest.raises(FetchRefused, match="on offer: that of step 7"):
        get([source], blank(live), step=STEP - 1)
    assert source.withdraw() == []
    with pytest.raises(FetchRefused, match="on offer: none"):
        get([source], blank(live))
    assert fetch_envelope([source.address], TOKEN, STEP, LINEAGE, WAIT_S) == {"at": "end"}
    source.envelope(STEP + 1, LINEAGE, {"at": "next"})
    with pytest.raises(FetchRefused, match="held: that of step 8"):
        fetch_envelope([source.address], TOKEN, STEP, LINEAGE, WAIT_S)
    assert fetch_envelope([source.address], TOKEN, STEP + 1, LINEAGE, WAIT_S) == {"at": "next"}


def test_a_source_that_is_about_to_end_the_step_is_waited_for(servers):
    live = state(8, 0.1)
    source, into = servers(), blank(live)
    late = threading.Timer(0.2, lambda: source.offer(STEP, LINEAGE, live, {"late": 1}))
    late.start()
    assert get([source], into).envelope == {"late": 1}
    late.join()
    assert equal(live, into)
    with pytest.raises(FetchRefused, match="has not come to the end of step 8"):
        get([source], into, step=STEP + 1, stall_s=0.1)


def test_a_fetch_ends_when_its_time_is_up_or_it_is_cancelled(servers):
    source, cancel = servers(), threading.Event()
    with pytest.raises(FetchRefused, match=r"the time is up|has not come to the end of step 7"):
        get([source], {}, limit_s=0.1)
    cancel.set()
    with pytest.raises(FetchRefused, match="cancelled"):
        get([source], {}, cancel=cancel)
    with pytest.raises(FetchRefused, match="there is no source"):
        get([], {})


def test_a_tensor_that_was_given_another_shape_since_is_not_served(serving):
    live = state(10, 0.1)
    source = serving(live)
    live["weight"].resize_(3)
    with pytest.raises(FetchRefused, match=r"withdrawn|changed"):
        get([source], blank(state(10, 0.1)))


def test_a_withdrawal_returns_only_when_nobody_reads_any_more(aside):
    offer = StateOffer(MARK, "", b"{}", table_of({}), {}, {})
    here, there = socket.socketpair()
    with here, there:
        with offer.reading(FramedChannel(here, 1.0)):
            withdrawing = aside(offer.withdraw, 0.0)
            assert not there.recv(1)  # the reader's connection has been broken: it is being waited for
            time.sleep(0.05)
            assert not withdrawing.done()
        withdrawing.result(WAIT_S)
        with pytest.raises(Withdrawn):
            offer.reading(FramedChannel(here, 1.0)).__enter__()
