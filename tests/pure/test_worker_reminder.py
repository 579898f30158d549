"""Reports that are send_until_acknowledged again until they are answered."""

import time

import pytest

from ft.worker.acknowledged import send_until_acknowledged


class Link:
    def __init__(self):
        self.sent = []

    def send(self, report):
        self.sent.append(report)


def test_a_report_is_said_again_until_the_block_ends():
    link = Link()
    with send_until_acknowledged(link, "left", period_s=0.01):
        assert link.sent[0] == "left"
        deadline = time.monotonic() + 10
        while len(link.sent) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    time.sleep(0.05)
    count = len(link.sent)
    time.sleep(0.05)
    assert len(link.sent) == count and set(link.sent) == {"left"}


def test_what_is_answered_at_once_is_said_once():
    link = Link()
    for _ in range(3):
        with send_until_acknowledged(link, "repaired"):
            pass
    assert link.sent == ["repaired"] * 3


def test_an_end_by_an_error_ends_the_reminders():
    link = Link()
    with pytest.raises(ValueError), send_until_acknowledged(link, "failed", period_s=0.01):
        raise ValueError
    time.sleep(0.05)
    count = len(link.sent)
    time.sleep(0.05)
    assert len(link.sent) == count
