"""What all ranks of a replica know of a step, beside their training threads."""

import threading
from concurrent.futures import Future

import pytest

from ft.job.quorum import Quorum, Report
from ft.systems.hsdp import agreement
from ft.systems.hsdp.agreement import Agreement
from ft.systems.hsdp.protocol import Question

LIMIT_S = 30.0


class Leader:
    """A quorum client that gives each question a quorum of its own, the second one not before it may."""

    def __init__(self):
        self.asked, self.may_answer = 0, threading.Event()

    def hello(self, rows, steps):
        """Nobody listens."""

    def ask(self, report):
        self.asked += 1
        assert self.asked == 1 or self.may_answer.wait(LIMIT_S)
        future = Future()
        future.set_result(Quorum(self.asked, 20, 6, (0,), (), {0: 1}))
        return future

    def rows(self, replica, life):
        return [{"ring": "r", "fetch": "f"}]


@pytest.fixture
def alone(monkeypatch):
    """One rank: what it gives to the group is what comes of it."""
    monkeypatch.setattr(agreement, "_gather", lambda group, row: [row])
    monkeypatch.setattr(agreement, "_broadcast", lambda group, content: content)


def test_the_answer_to_a_question_is_never_that_to_the_one_before(alone):
    leader = Leader()
    both = Agreement(None, {})
    both.begin(leader)
    question, answers = Question(Report(0, 1, 20, 6), False, 60.0), []

    def then(_, agreed):  # what waits for the first quorum goes on with its step, and has failed it already
        if agreed.quorum.number == 1:
            both.ask(question, then)

    both.ask(question, then)
    while leader.asked < 2:
        threading.Event().wait(0.001)
    waiting = threading.Thread(target=lambda: answers.append(both.wait().quorum.number))
    waiting.start()
    waiting.join(0.1)
    leader.may_answer.set()
    waiting.join(LIMIT_S)
    both.close()
    assert answers == [2]
