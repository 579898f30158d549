"""The rules of health: from two readings of a node to findings, and what findings make of a guess from an error."""

import dataclasses
import re

import pytest

from ft.faults import verdict
from ft.faults.health import ACTIONS, DRAIN, EVICT, RULES, WATCH, Rule, informed, rules
from ft.faults.health.rule import GREW, HAPPENED, LINK, THIS
from ft.platform.health import COUNTER, EVENT, GAUGE, Observation, Reading
from ft.platform.health.kernel_log import LINES

IMPORTANT = (13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 143, 145, 149, 154)
CATEGORIES = {verdict.DEVICE, verdict.HOST, verdict.NETWORK, verdict.SOFTWARE}


def reading(*observed, when=100.0):
    """Return a reading of (device, name, value, kind[, text])."""
    made = (Observation("n0", d, name, value, "", when, kind, *text) for d, name, value, kind, *text in observed)
    return Reading("n0", when, tuple(made))


def xid(number, device="gpu0", text="NVRM: Xid"):
    return (device, f"xid.{number}", number, EVENT, text)


# ----------------------------------------------------------------------------------------------- the table


def test_every_row_is_complete():
    for rule in RULES:
        assert rule.category in CATEGORIES and rule.action in ACTIONS, rule
        assert rule.advice.endswith((".", ":")) and rule.meaning and len(rule.source) > 5, rule
    names = [rule.observation for rule in RULES]
    assert len(set(names)) == len(names)
    assert names.index("xid.*") > max(names.index(f"xid.{number}") for number in IMPORTANT)


def test_every_important_xid_and_every_line_of_the_log_has_a_row():
    rows = {rule.observation for rule in RULES}
    assert {f"xid.{number}" for number in IMPORTANT} <= rows
    assert {line.name for line in LINES} - {"xid.{code}"} <= rows


def test_no_row_acts_against_a_device_for_what_others_may_have_done():
    assert {rule.action for rule in RULES if rule.cause != THIS} == {WATCH}
    row = next(rule for rule in RULES if rule.observation == "nvlink.up")
    assert row.cause == LINK
    with pytest.raises(ValueError, match="although the cause is"):
        dataclasses.replace(row, action=DRAIN)
    of_peers = [rule for rule in RULES if re.search("peer|ack|rnr|seq|remote", rule.observation + rule.meaning)]
    assert len(of_peers) > 4 and {rule.action for rule in of_peers} == {WATCH}


@pytest.mark.parametrize(
    "number, category, action",
    [
        (13, verdict.SOFTWARE, WATCH),
        (31, verdict.SOFTWARE, WATCH),
        (43, verdict.SOFTWARE, WATCH),
        (45, verdict.SOFTWARE, WATCH),
        (48, verdict.DEVICE, EVICT),
        (63, verdict.DEVICE, WATCH),
        (64, verdict.DEVICE, DRAIN),
        (74, verdict.NETWORK, WATCH),
        (79, verdict.HOST, DRAIN),
        (94, verdict.DEVICE, WATCH),
        (95, verdict.DEVICE, DRAIN),
        (119, verdict.DEVICE, DRAIN),
        (140, verdict.DEVICE, DRAIN),
        (999, verdict.SOFTWARE, WATCH),
    ],
)
def test_an_xid_is_judged(number, category, action):
    (found,) = rules(reading(), reading(xid(number)))
    assert (found.device, found.observation, found.category, found.action) == (
        "gpu0",
        f"xid.{number}",
        category,
        action,
    )
    assert "NVRM: Xid" in found.reason and found.source.startswith("NVIDIA Xid catalog")


# ------------------------------------------------------------------------------------------- two readings


def test_only_new_events_count_and_equal_ones_are_one_finding():
    old, new = xid(79, text="[1.0] x"), [xid(79, text=f"[{second}.0] x") for second in (2, 3)]
    assert not rules(reading(old), reading(old))
    (found,) = rules(reading(old), reading(old, *new))
    assert found.reason == "Xid 79: the GPU has fallen off the bus: 2 times, the last: [3.0] x"
    assert len(rules(None, reading(old))) == 1, "without an earlier reading, all events count"
    assert len(rules(reading(), reading(xid(79), xid(79, "gpu1"), xid(95)))) == 3


def test_a_counter_counts_by_its_growth():
    before = reading(("mc0", "memory.corrected", 1e6, COUNTER), ("mc0", "memory.uncorrected", 4, COUNTER))
    same = reading(("mc0", "memory.corrected", 1e6 + 99, COUNTER), ("mc0", "memory.uncorrected", 4, COUNTER), when=130)
    assert not rules(None, before) and not rules(before, same)
    worse = reading(
        ("mc0", "memory.corrected", 1e6 + 100, COUNTER), ("mc0", "memory.uncorrected", 5, COUNTER), when=130
    )
    first, second = rules(before, worse)
    assert (first.observation, first.action) == ("memory.uncorrected", EVICT), "the most severe finding is the first"
    assert second.reason == "many corrected memory errors: 100 in 30 s, 1.0001e+06 in all"


def test_a_counter_of_a_device_that_was_not_there_before_is_not_judged():
    assert not rules(reading(), reading(("mlx5_0/1", "port.link_downed", 7, COUNTER)))


@pytest.mark.parametrize(
    "name, before, now, is_found",
    [
        ("gpu.rows.failed", None, 1, True),
        ("gpu.rows.failed", 1, 1, True),
        ("gpu.rows.failed", None, 0, False),
        ("gpu.temperature.margin", None, 2, True),
        ("gpu.temperature.margin", None, 20, False),
        ("port.up", 1, 0, True),
        ("port.up", 0, 0, False),
        ("port.up", None, 0, False),
        ("gpu.pcie.lanes_lost", 0, 8, True),
        ("gpu.pcie.lanes_lost", None, 8, False),
        ("clock.ahead", 50.0, 48.0, True),
        ("clock.ahead", 50.0, 50.2, False),
        ("clock.unsynchronized", None, 1, False),
        ("memory.available_share", None, 0.01, True),
        ("memory.available_share", None, 0.5, False),
    ],
)
def test_a_value_counts_by_itself_or_by_its_change(name, before, now, is_found):
    earlier = None if before is None else reading(("x", name, before, GAUGE))
    assert bool(rules(earlier, reading(("x", name, now, GAUGE)))) == is_found


def test_several_events_can_be_needed_for_a_finding():
    lines = [("pci 0", "log.pcie.corrected", 1, EVENT, f"[{second}.0]") for second in range(10)]
    assert not rules(None, reading(*lines[:9])) and len(rules(None, reading(*lines))) == 1


def test_a_table_of_ones_own():
    words = ("nothing left", "Fill it.", "the manual")
    own = [Rule("fuel", GREW, 5, verdict.HOST, WATCH, THIS, *words)]
    counted = reading(("", "fuel", 3, COUNTER)), reading(("", "fuel", 8, COUNTER))
    assert [found.advice for found in rules(*counted, own)] == ["Fill it."]
    assert not rules(None, reading(("", "fuel", 8, EVENT)), [dataclasses.replace(own[0], condition=HAPPENED, limit=2)])


# ------------------------------------------------------------------------------------ evidence and guesses


def found(*observed):
    return rules(reading(), reading(*observed))


GUESS = verdict.of_error(["RuntimeError"], "NCCL error: ncclRemoteError")
BUG = verdict.of_error(["AcceleratorError"], "CUDA error: device-side assert triggered")


def test_evidence_against_the_own_device_replaces_a_guess():
    assert (GUESS.category, GUESS.action) == (verdict.TRANSIENT, verdict.RETRY)
    better = informed(GUESS, found(xid(95, "gpu3")), "gpu3")
    assert (better.category, better.action, better.signal) == (verdict.DEVICE, verdict.REPLACE, "xid.95")
    assert better.device_unusable and not better.node_suspect and "ncclRemoteError" in better.reason
    assert BUG.action == verdict.RESTART and informed(BUG, found(xid(140, "gpu3")), "gpu3").action == verdict.REPLACE


def test_a_fault_of_another_device_a_peer_or_a_program_changes_no_verdict():
    others = found(xid(95, "gpu2"), xid(79, "gpu30"), xid(74, "gpu3"), xid(31, "gpu3"), xid(45, "gpu3"))
    path = rules(
        reading(("mlx5_0/1", "port.up", 1, GAUGE), ("mlx5_0/1", "port.local_ack_timeout_err", 0, COUNTER)),
        reading(("mlx5_0/1", "port.up", 0, GAUGE), ("mlx5_0/1", "port.local_ack_timeout_err", 99, COUNTER)),
    )
    assert len(others) == 5 and len(path) == 2
    for guess in (GUESS, BUG):
        assert informed(guess, [*others, *path], "gpu3") == guess


def test_evidence_against_the_node_makes_the_node_suspect():
    better = informed(GUESS, found(("mc0", "log.memory.uncorrected", 1, EVENT, "EDAC MC0: 1 UE")), "gpu3")
    assert better.node_suspect and not better.device_unusable and better.category == verdict.HOST


def test_what_stops_the_run_is_not_turned_into_a_replacement():
    stop = verdict.of_exit(verdict.USER_CODE)
    assert informed(stop, found(xid(79)), "gpu0") == stop
