"""The table of rules of health.

What follows from them is in ``conversations/health``.
"""

import dataclasses
import re

import pytest

from ft.faults import verdict
from ft.faults.health import ACTIONS, DRAIN, LINK, RULES, THIS, WATCH
from ft.platform.health import gpus
from ft.platform.health.kernel_log import LINES

IMPORTANT = (13, 31, 32, 38, 43, 44, 45, 46, 48, 61, 62, 63, 64, 66, 68, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120)
IMPORTANT += (*range(121, 126), 136, 137, 140, 143, *range(144, 151), *range(154, 159), 171, 172)
CATEGORIES = {verdict.DEVICE, verdict.HOST, verdict.NETWORK, verdict.SOFTWARE}


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
