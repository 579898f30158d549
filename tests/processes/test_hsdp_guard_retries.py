"""A replica's guard with everything around it made up: what it does where a step is not committed."""

import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
import torch

from ft.job.messages import Finish
from ft.job.quorum import Quorum
from ft.protection.stack import Stack
from ft.state.fetch import Fetched, FetchRefused
from ft.systems.hsdp import catch_up
from ft.systems.hsdp import rank as votes
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.protocol import Agreed, LastSave
from ft.systems.hsdp.replica_manager import ReplicaManager
from ft.systems.hsdp.work import Work

REPLICA = 1
BEHIND = Quorum(7, 20, 6, (0, 2), (REPLICA,), {0: 1, 1: 2, 2: 1})
HEALTHY = Quorum(8, 20, 6, (0, 1), (2,), {0: 1, 1: 2, 2: 2})


@pytest.fixture
def others(monkeypatch):
    """What the other ranks of the replica bring to each reduction, the smallest counts; as they agree: nothing."""
    brought: list[torch.Tensor] = []

    def all_reduce(tensor, op):
        if brought:
            torch.minimum(tensor, brought.pop(0), out=tensor)

    monkeypatch.setattr(Made, "votes", SimpleNamespace(all_reduce=all_reduce))
    return brought


def agreed(quorum):
    members = quorum.members if quorum is not None else ()
    return Agreed(quorum, {one: [{"ring": f"ring{one}", "fetch": f"fetch{one}"}] for one in members})


class Made:
    """A guard and what it works with; ``told``: what was done to its parts, in this order."""

    votes = None

    def __init__(self, tmp_path, *, comes_back=False, applied=True, last_save=None):
        place = ReplicaContext(REPLICA, 3, tmp_path, "127.0.0.1", comes_back=comes_back)
        self.parts, self.told = MagicMock(place=place, work=Work(place), batch=4, save_interval=None), []
        self.parts.session.rank, self.parts.session.closed, self.parts.votes = 0, False, self.votes
        self.parts.session.next_order = AsyncMock(return_value=Finish())
        self.parts.session.is_ended_by.return_value = False
        self.parts.position = MagicMock(step=20, lineage=6)
        self.parts.state.whole.return_value = ({}, {})
        self.parts.server.withdraw.return_value = []
        self.parts.catch_up.wait.return_value = ""
        self.parts.exchange = MagicMock(problem="", suspect=None, waited_s=0.0, is_stale=False, is_repeated=False)
        self.parts.optimizer = SimpleNamespace(param_groups=[], step=lambda: self.note("update") or (applied, None, 0))
        for part, name in (
            ("subject", "abandon_step"),
            ("subject", "publish_parameters"),
            ("server", "withdraw"),
            ("server", "offer"),
            ("catch_up", "adopt"),
            ("exchange", "give_up"),
            ("ring", "reconfigure"),
        ):
            self.note_calls(part, name)
        self.guard = ReplicaManager(self.parts, lambda: False, lambda: None, last_save)
        Stack([self.guard]).protect(self.parts.optimizer)

    def note(self, what):
        self.told.append(what)

    def note_calls(self, part, name):
        method = getattr(getattr(self.parts, part), name)
        answer = method.return_value
        method.side_effect = lambda *_, **__: self.note(name) or answer

    def agree(self, quorum):
        """Let every question be answered with ``quorum``."""
        self.answers(lambda: quorum)

    def answers(self, next_quorum):
        """Let each question be answered with the result of ``next_quorum``, as the agreement thread does it."""

        def ask(question, then):
            answer = agreed(next_quorum())
            then(question, answer)
            self.parts.agreement.wait.return_value = answer

        self.parts.agreement.ask.side_effect = ask

    def fails(self, problem="a third replica was killed", suspect=None):
        self.parts.exchange.problem, self.parts.exchange.suspect = problem, suspect

    def run(self, *attempts):
        """Carries through what each attempt does; the last one must end."""
        left = list(attempts)

        def attempt():
            left.pop(0)()

        self.guard.run_with_recovery(attempt)
        assert not left

    def step(self):
        """Commits a step that this replica computes."""
        assert self.guard.begins()
        self.parts.optimizer.step()
        self.guard.committed()

    def catch_up(self):
        assert not self.guard.begins()
        self.guard.catching_up()
        self.guard.caught_up()
        self.parts.optimizer.step()


@pytest.mark.parametrize(("own", "other", "told"), [(None, 2, (2,)), (0, 2, (0, 2)), (0, None, (0,)), (None, None, ())])
def test_the_report_names_whom_any_rank_could_not_reach(own, other, told, tmp_path, others):
    made = Made(tmp_path)
    made.agree(HEALTHY)

    def fails():
        assert made.guard.begins()
        made.fails(suspect=own)
        theirs = torch.ones(votes._MOST_MEMBERS, dtype=torch.int32)
        if other is not None:
            theirs[other] = 0
        others.extend([torch.zeros(1, dtype=torch.int32), theirs])
        made.parts.optimizer.step()

    made.run(fails, made.guard.begins)
    assert made.parts.agreement.ask.call_args.args[0].report.suspects == told


def test_one_that_finds_itself_behind_in_its_step_tells_the_others_by_the_ring_that_they_expect_it_in(tmp_path, others):
    made = Made(tmp_path)
    made.agree(HEALTHY)
    made.step()
    made.told.clear()
    made.agree(BEHIND)
    assert made.guard.begins(), "it computes, as it does not know yet"
    assert made.told == ["reconfigure", "give_up"], "its door would let them wait until their limit"
    number, addresses, me = made.parts.ring.reconfigure.call_args.args
    assert (number, addresses, me) == (BEHIND.number, ["ring0", "ring1", "ring2"], REPLICA)


ALL = Quorum(9, 20, 8, (0, 1, 2), (), {0: 1, 1: 2, 2: 2})
WITHOUT_FIRST = Quorum(10, 20, 8, (1, 2), (0,), {0: 2, 1: 2, 2: 2})
OVER = Quorum(11, 20, 8, (1,), (), {1: 2}, finished=True)
AHEAD = Quorum(12, 21, 9, (0, 2), (1,), {0: 1, 1: 2, 2: 2})


@pytest.mark.parametrize(
    ("answers", "writes", "why"),
    [
        ([WITHOUT_FIRST], True, "replica 0, whose turn it was, is lost in its save"),
        ([ALL, OVER], False, "replica 0 has saved it meanwhile"),
        ([ALL, ALL], True, "replica 0 does not know that the run ends here"),
        ([ALL, AHEAD], False, "the others go on with later steps"),
        ([None], True, "there is no server any more"),
    ],
)
def test_the_last_checkpoint_is_written_by_one_that_is_left(answers, writes, why, tmp_path, others):
    written = []
    made = Made(tmp_path, last_save=LastSave(lambda step: False, lambda: written.append(made.parts.position.step)))
    left = list(answers)

    def last_step():
        made.agree(ALL)
        made.step()
        made.answers(lambda: left.pop(0))
        made.told.clear()

    made.run(last_step)
    assert (written == [20]) is writes and not left, why
    told = [what for what in made.told if what in ("reconfigure", "give_up")]
    in_rings = sum(quorum is not None and not quorum.finished for quorum in answers)
    assert told.count("reconfigure") == in_rings and told[-1] == "give_up", "others would wait for it in their rings"


def test_nobody_waits_for_a_last_checkpoint_that_is_there(tmp_path, others):
    made = Made(tmp_path, last_save=LastSave(lambda step: True, lambda: pytest.fail("it is there")))
    made.agree(ALL)
    made.run(made.step)
    made.parts.agreement.ask.assert_called_once()


def test_a_replica_gives_its_zeros_when_its_sources_know_that_it_fetches_and_not_much_later(tmp_path, monkeypatch):
    begun, fetched = threading.Event(), Fetched({}, 9, 0.1, {})

    def fetch(*_, has_begun, **__):
        begun.set()
        has_begun.set()
        return fetched

    monkeypatch.setattr(catch_up.fetch, "fetch", fetch)
    monkeypatch.setattr(catch_up, "_BEGIN_S", 30.0)
    state = MagicMock(tensors=lambda: {})
    monkeypatch.setattr(ReplicaContext, "token", "")
    one = catch_up.CatchUp(MagicMock(rank=0), ReplicaContext(REPLICA, 3, tmp_path, "127.0.0.1"), state)
    one.begin(agreed(BEHIND), keeps_state=False)
    assert begun.is_set()

    def refused(*_, **__):
        raise FetchRefused("nobody has it")

    monkeypatch.setattr(catch_up.fetch, "fetch", refused)
    one.begin(agreed(BEHIND), keeps_state=False)  # and returns, though no source has said a word
