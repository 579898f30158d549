"""The rules of health: from two readings of a node to findings, and what findings make of a guess from an error."""

import dataclasses
import re

import pytest

from ft.faults import verdict
from ft.faults.health import ACTIONS, DRAIN, EVICT, GREW, HAPPENED, LINK, RULES, THIS, WATCH, Rule, informed, rules
from ft.platform.health import COUNTER, EVENT, GAUGE, Observation, Reading, gpus
from ft.platform.health.kernel_log import LINES

IMPORTANT = (13, 31, 32, 38, 43, 44, 45, 46, 48, 61, 62, 63, 64, 66, 68, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120)
IMPORTANT += (*range(121, 126), 136, 137, 140, 143, *range(144, 151), *range(154, 159), 171, 172)
OF_PROGRAMS = (8, 11, 13, 31, 32, 37, 38, 39, 43, 44, 45, 66, 68, 69, 71, 85, 99, 108, 131, 137, 139, 999)
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
        assert rule.action == WATCH or rule.category != verdict.SOFTWARE, rule
    names = [rule.observation for rule in RULES]
    assert len(set(names)) == len(names)
    assert names.index("xid.*") > max(names.index(f"xid.{number}") for number in IMPORTANT)


def test_every_important_xid_and_every_line_of_the_log_has_a_row():
    rows = {rule.observation for rule in RULES}
    assert {f"xid.{number}" for number in IMPORTANT} <= rows
    assert {line.name for line in LINES if "{code}" not in line.name} - {"gpu.recovered"} <= rows
    assert {f"xid.{number}.fatal" for number in range(144, 150)} | {"xid.94.reset"} <= rows
    for name in (*gpus.RECOVERY_ACTIONS[1:], gpus.UNKNOWN_ACTION):
        assert {f"xid.154.{name}", f"gpu.recovery.{name}"} <= rows
    assert not {"gpu.recovered", "gpu.recovery.none", "xid.154.none"} & rows, "they are no faults"


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
        *((number, verdict.SOFTWARE, WATCH) for number in OF_PROGRAMS),
        (46, verdict.DEVICE, DRAIN),
        (48, verdict.DEVICE, EVICT),
        (61, verdict.DEVICE, WATCH),
        (63, verdict.DEVICE, WATCH),
        (64, verdict.DEVICE, DRAIN),
        (74, verdict.NETWORK, WATCH),
        (79, verdict.HOST, DRAIN),
        (94, verdict.DEVICE, WATCH),
        (95, verdict.DEVICE, DRAIN),
        (109, verdict.DEVICE, EVICT),
        (110, verdict.DEVICE, DRAIN),
        (119, verdict.DEVICE, DRAIN),
        (136, verdict.NETWORK, WATCH),
        (140, verdict.DEVICE, DRAIN),
        ("145.fatal", verdict.DEVICE, DRAIN),
        (145, verdict.NETWORK, WATCH),
        ("149.fatal", verdict.NETWORK, WATCH),
        (150, verdict.DEVICE, DRAIN),
        (154, verdict.DEVICE, WATCH),
        ("154.gpu_reset", verdict.DEVICE, DRAIN),
        ("154.node_reboot", verdict.HOST, DRAIN),
        ("154.drain_and_reset", verdict.DEVICE, WATCH),
        ("154.drain_p2p", verdict.NETWORK, WATCH),
        ("154.recover_imex_domain", verdict.NETWORK, WATCH),
        (155, verdict.NETWORK, WATCH),
        (158, verdict.DEVICE, DRAIN),
        (175, verdict.DEVICE, DRAIN),
    ],
)
def test_an_xid_is_judged(number, category, action):
    (found,) = rules(reading(), reading(xid(number)))
    assert (found.device, found.observation) == ("gpu0", f"xid.{number}")
    assert (found.category, found.action, found.is_evidence) == (category, action, action != WATCH)
    assert "NVRM: Xid" in found.reason and found.source.startswith("NVIDIA ")
    assert number == 999 or found.source.endswith(f", Xid {str(number).partition('.')[0]}")


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


def test_a_switch_that_goes_down_lays_no_action_on_the_gpus_behind_it():
    lines = [(f"gpu{index}", name, 1, EVENT, "x") for index in range(8) for name in ("xid.149.fatal", "xid.74")]
    lines += [(f"gpu{index}", "xid.154.drain_and_reset", 154, EVENT, "x") for index in range(8)]
    lines += [("nvswitch 0000:c1:00.0", "sxid.fatal", 20034, EVENT, "x"), ("gpu0", "gpu.fabric.failed", 1, GAUGE)]
    several = found(*lines)
    assert len(several) == 26 and not [each for each in several if each.is_evidence]
    assert informed(GUESS, several, "gpu3") == GUESS
    assert informed(GUESS, found(("nvswitch 0000:c1:00.0", "sxid.switch", 23001, EVENT, "x")), "gpu3").node_suspect


def test_of_several_gpus_only_the_one_that_has_to_be_reset_is_left_out():
    several = found(xid("154.gpu_reset", "gpu1"), xid("145.fatal", "gpu1"), xid(31, "gpu0"), xid(45, "gpu2"))
    assert informed(GUESS, several, "gpu0") == informed(GUESS, several, "gpu2") == GUESS
    assert informed(GUESS, several, "gpu1").device_unusable
    state = rules(None, reading(("gpu1", "gpu.recovery.gpu_reset", 1, GAUGE), ("gpu0", "gpu.recovery.none", 0, GAUGE)))
    assert [(each.device, each.action) for each in state] == [("gpu1", DRAIN)]


def test_a_gpu_that_is_not_known_may_be_that_of_another_job():
    others = found(xid(79, "gpu 0000:5e:00"), ("gpu 0000:5e:00", "log.pcie.fatal", 1, EVENT, "x"))
    assert len(others) == 2 and all(each.is_evidence for each in others)
    assert informed(GUESS, others, "gpu3") == informed(GUESS, others, "") == GUESS


def test_evidence_against_the_node_makes_the_node_suspect():
    better = informed(GUESS, found(("mc0", "log.memory.uncorrected", 1, EVENT, "EDAC MC0: 1 UE")), "gpu3")
    assert better.node_suspect and not better.device_unusable and better.category == verdict.HOST


def test_what_stops_the_run_is_not_turned_into_a_replacement():
    stop = verdict.of_exit(verdict.USER_CODE)
    assert informed(stop, found(xid(79)), "gpu0") == stop
