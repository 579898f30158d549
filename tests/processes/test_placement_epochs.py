"""Who holds a worker's copies from epoch to epoch, and what is said of it. Seats and layout are made up here; what
real runs do with them: test_placement_nodes."""

from types import SimpleNamespace

import pytest

from ft.base.errors import UserError
from ft.job.parts import Seat
from ft.systems.hot_swap.recovery_manager import Placing


class Told:
    """A worker's session, as far as placing goes by it: seats in, events out."""

    def __init__(self, nodes: str, rank: int = 0, joins: bool = False, racks: dict | None = None):
        self.rank, self.joins, self.racks, self.events = rank, joins, racks or {}, []
        self.sit(nodes)

    def sit(self, nodes: str) -> None:
        self.seats = {
            r: Seat(f"w{r}", node, "", 0, {"rack": self.racks[node]} if node in self.racks else {})
            for r, node in enumerate(nodes.split())
        }

    def observe(self, event: str, **detail) -> None:
        self.events.append((event, detail))

    def named(self, name: str) -> list[dict]:
        return [detail for event, detail in self.events if event == name]


def subject(*groups, rank: int = 0, complete: bool = True):
    mine = next(group for group in groups if rank in group)
    return SimpleNamespace(dp_groups=list(groups), dp_peers=mine, shards=["s"], copies_are_complete=complete)


@pytest.fixture(autouse=True)
def two_training_nodes(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")


PAIRS = ([0, 1], [2, 3])


def test_a_start_says_where_copies_are_and_a_swap_where_they_go(capsys):
    session = Told("a a b b")
    placing = Placing(session, subject(*PAIRS), 1)
    (holder,) = placing.begin()
    assert holder in (2, 3)
    (layout,), (placed,) = session.named("layout"), session.named("copies_placed")
    assert layout["copies"] == {"0": [holder]} and layout["complete"] == {"0": True}
    assert placed["copies"]["0"] == [holder] and placed["moved"] == 0 and placed["problems"] == []
    session.sit("a a a b")
    before = placed["copies"]
    assert placing.renew(before) == [3]
    placed = session.named("copies_placed")[-1]
    assert all((held == [3]) == (owner != "3") for owner, held in placed["copies"].items())
    assert "logical rank(s) 3 hold up to 3 copies, 1 each would be even" in capsys.readouterr().out


def test_a_node_that_takes_everything_is_said_once_and_its_end_too(capsys):
    session = Told("a a b b")
    placing = Placing(session, subject(*PAIRS), 1)
    placing.begin()
    before = session.named("copies_placed")[0]["copies"]
    assert capsys.readouterr().out == ""
    session.sit("a a a a")
    placing.renew(before)
    assert "logical rank(s) 0-3: their state and the only copy of it are in node a" in capsys.readouterr().out
    placing.renew(before)
    assert capsys.readouterr().out == ""
    session.sit("a a b b")
    assert placing.renew(before) == before["0"]
    assert "respected again" in capsys.readouterr().out
    assert [bool(event["problems"]) for event in session.named("copies_placed")] == [False, True, True, False]


def test_who_starts_on_one_node_is_told_nothing_unless_he_asks(capsys, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert Placing(Told("a a a a"), subject(*PAIRS), 1).begin() == [1]
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"cannot be placed(.|\n)*in node a"):
        Placing(Told("a a a a"), subject(*PAIRS), 1, strict=True).begin()


def test_strict_runs_go_on_after_a_swap(capsys):
    session = Told("a a b b", racks={"a": "r1", "b": "r2", "c": "r1"})
    placing = Placing(session, subject(*PAIRS), 1, strict=True)
    placing.begin()
    session.sit("a a c c")
    placing.renew(session.named("copies_placed")[0]["copies"])
    assert "are in rack r1" in capsys.readouterr().out


def test_what_is_refused_is_said_by_one():
    racks = {"a": "r1", "b": "r1"}
    with pytest.raises(UserError, match="are in rack r1"):
        Placing(Told("a a b b", racks=racks), subject(*PAIRS), 1, strict=True).begin()
    assert Placing(Told("a a b b", rank=1, racks=racks), subject(*PAIRS, rank=1), 1, strict=True).begin() == [3]


def test_a_joiner_is_told_by_the_order_to_repair_and_reports_only_then(capsys):
    session = Told("a a c b", rank=2, joins=True)
    placing = Placing(session, subject(*PAIRS, rank=2), 1)
    assert placing.begin() == []
    assert "copies" not in session.named("layout")[0] and not session.named("copies_placed")
    before = {0: [2], 1: [3], 2: [0], 3: [1]}
    assert placing.renew(before) == [3]  # its peer is on another node again
    assert session.named("layout")[1] == {"copies": {"2": [3]}}
    assert capsys.readouterr().out == ""  # rank 0 speaks for all


def test_all_ranks_come_to_the_same():
    before = {0: [2], 1: [3], 2: [0], 3: [1]}
    told = []
    for rank in range(4):
        session = Told("a a b c", rank=rank)
        told.append(Placing(session, subject(*PAIRS, rank=rank), 1).renew(before))
    session = Told("a a b c")
    Placing(session, subject(*PAIRS), 1).renew(before)
    assert session.named("copies_placed")[0]["copies"] == {str(rank): held for rank, held in enumerate(told)}
