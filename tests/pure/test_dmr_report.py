"""``ft report`` of runs whose operators were executed twice, from event files made by hand."""

import pytest
from histories import History, write
from test_report_files import report

from ft.base import events
from ft.observe.report.page import page
from ft.observe.report.protections import corruption, coverage, summary_of
from ft.observe.report.record import load


class Watched(History):
    """A run of 4 ranks with DMR."""

    def covered(self, at: float, ranks=range(4), **counts: int) -> None:
        for rank in ranks:
            self.say(at, events.DMR_COVERED, rank=rank, epoch=self.epoch, step=1, strategy="piggyback", counts=counts)

    def mismatch(self, at: float, rank: int, step: int, attempt: int = 1, **values) -> None:
        told = {
            **{"operator": "mm", "phase": "backward", "layer": 3, "microbatch": 2, "how": "at once", "note": ""},
            **{"host": f"node{rank}", "device": "cuda:1 (H200)", "elements": 3, "of": 4096, "chunk": 0, "index": 7},
        }
        self.say(at, events.DMR_MISMATCH, rank=rank, epoch=self.epoch, step=step, attempt=attempt, **{**told, **values})

    def verdict(self, at: float, step: int, action: str, attempt: int = 1, ranks=(), blamed=()) -> None:
        reason = f"attempt {attempt} went wrong"
        values = {"action": action, "reason": reason, "ranks": list(ranks), "blamed": list(blamed)}
        self.say(at, events.DMR_VERDICT, step=step, epoch=self.epoch, attempt=attempt, **values)

    def clean(self, at: float, step: int, attempt: int) -> None:
        self.say(at, events.DMR_CLEAN, step=step, epoch=self.epoch, attempt=attempt)


def eventful() -> Watched:
    """A flip that one retry makes good, and a broken rank that is evicted."""
    history = Watched()
    history.covered(1.2, naive=100, P=40)
    history.mismatch(4.0, rank=1, step=20, how="recomputation", elements=None, of=None, layer=0)
    history.mismatch(4.0, rank=2, step=20, operator="<b>native_layer_norm</b>")
    history.verdict(4.1, 20, "retry", ranks=[1, 2])
    history.clean(4.2, 20, 2)
    for attempt in (1, 2, 3):
        history.mismatch(6.0 + 0.1 * attempt, rank=3, step=40, attempt=attempt)
        action = "retry" if attempt < 3 else "evict"
        blamed = [3] if attempt == 3 else []
        history.verdict(6.0 + 0.1 * attempt, 40, action, attempt, ranks=[3], blamed=blamed)
    history.detect(6.4, 3, step=39, signal="silent data corruption")
    history.close(6.4)
    history.open(6.5, r3="n0.w4")
    history.repair(6.6, 39)
    history.covered(7.0, ranks=[3], naive=100, P=40)
    history.finish(11.0, 90)
    return history


def test_what_dmr_did_is_read_from_the_events():
    found = corruption(eventful().events)
    assert (found.strategy, found.ranks, found.covered) == ("piggyback", 4, {"naive": 400, "P": 160})
    assert (len(found.mismatches), found.redone, found.evicted, found.gave_up, found.clean) == (5, 3, (3,), False, 1)
    assert found.steps == [20, 40]
    first, second, *_, last = found.rows
    place = ("rank 1, node1, cuda:1 (H200)", "mm", "backward", "outside", "2")
    assert first == ("20", *place, "recomputation", "some", "step redone")
    assert (second[0], second[4], second[7]) == ("20", "3", "3 of 4096")
    assert (last[0], last[8]) == ("40, attempt 3", "rank 3 evicted")


def test_a_fall_of_the_coverage_is_shown(tmp_path):
    history = eventful()
    history.say(8.0, events.DMR_COVERAGE_FELL, step=60, epoch=history.epoch, before=1.0, now=0.987654)
    found = corruption(history.events)
    assert found.falls == ((60, 1.0, 0.987654),)
    assert "coverage fell from 100.00% to 98.77% in step 60" in summary_of(found)
    assert "coverage fell from 100.00% to 98.77% in step 60" in page(load(write(tmp_path, history)), b"")


def test_the_summary_is_one_line():
    assert summary_of(corruption(eventful().events)) == (
        "piggyback: 5 mismatches, 3 attempts redone, 1 step correct in the end, rank 3 evicted; "
        "operators: 400 at once, 160 with the recomputation"
    )
    history = Watched()
    history.mismatch(2.0, 0, 3)
    history.verdict(2.1, 3, "give up", ranks=[0])
    assert summary_of(corruption(history.events)) == "no coverage recorded: 1 mismatch, given up"


def test_sets_come_before_what_is_counted_beside():
    history = Watched()
    history.covered(
        1.0,
        late=900,
        naive=1,
        D_inter=50,
        unchecked=2,
        unverified=0,
        **{"in windows": 3, "other": 4, "not in the plan": 6},
    )
    assert coverage(corruption(history.events)) == (
        "200 in windows between units, 16 other, 8 unchecked (not reproducible), 4 at once, "
        "3600 after the last one, 24 not found in the plan, 12 verified in their window"
    )


def test_the_report_shows_it(tmp_path, capsys):
    folder = write(tmp_path / "a", eventful(), steps=90)
    said, page = report(folder, capsys)
    text = " ".join(page.texts)
    for words in (
        *(
            "Operators whose two executions differed (DMR)",
            "5 mismatches, 3 attempts redone, 1 step correct in the end",
        ),
        *("<b>native_layer_norm</b>", "rank 3, node3, cuda:1 (H200)", "3 of 4096", "outside", "40, attempt 3"),
        *("rank 3 evicted", "step redone", "160 with the recomputation"),
    ):
        assert words in text, words
    assert "DMR        piggyback: 5 mismatches, 3 attempts redone, 1 step correct in the end, rank 3 evicted" in said
    assert "40, attempt 3  rank 3, node3, cuda:1 (H200)  mm " in said


def test_the_picture_has_a_mark_for_each_wrong_attempt(tmp_path):
    from ft.observe.report import timeline
    from ft.show import palette
    from ft.show.axes import rows

    run = load(write(tmp_path / "a", eventful(), steps=90))
    _, (lanes, loss) = rows("", [2.0, 2.0])
    timeline._draw_workers(lanes, run)
    timeline._draw_loss(loss, run)
    marks = [line for line in lanes.lines if line.get_marker() == "D"]
    assert sorted(int(line.get_ydata()[0]) for line in marks) == [1, 2, 3, 3, 3]
    assert [text.get_text() for text in lanes.get_legend().get_texts()] == ["replaced", "mismatch (DMR)"]
    dotted = [line for line in loss.lines if line.get_color() == palette.MISMATCH]
    assert sorted(int(line.get_xdata()[0]) for line in dotted) == [20, 40]


def test_a_run_without_a_mismatch(tmp_path, capsys):
    history = Watched()
    history.covered(1.2, naive=100)
    history.finish(11.0, 90)
    said, page = report(write(tmp_path / "a", history, steps=90), capsys)
    assert any("piggyback: 0 mismatches" in text for text in page.texts)
    assert "piggyback: 0 mismatches; operators: 400 at once" in said


def test_a_run_without_dmr_says_nothing_of_it(tmp_path, capsys):
    history = History()
    history.finish(11.0, 90)
    assert corruption(history.events) is None
    said, page = report(write(tmp_path / "a", history, steps=90), capsys)
    assert "DMR" not in said
    assert "DMR" not in " ".join(page.texts)


def test_many_mismatches_are_cut(tmp_path, capsys):
    history = Watched()
    for i in range(300):
        history.mismatch(2.0 + i / 100, rank=i % 4, step=i)
    said, page = report(write(tmp_path / "a", history, steps=310), capsys)
    assert page.tags.count("tr") > 300
    assert "and 292 more, in report.html" in said and "no coverage recorded: 300 mismatches" in said


@pytest.mark.parametrize(
    "values",
    [
        {"attempt": None, "layer": None, "microbatch": None, "host": None, "device": None, "elements": "x", "of": {}},
        {"attempt": [1], "layer": "4", "microbatch": {}, "host": 3, "operator": None, "of": None},
    ],
)
def test_events_are_taken_as_they_come(values, tmp_path, capsys):
    history = Watched()
    for rank in (0, 77):
        history.mismatch(2.0, rank, 3, **values)
    for counts in ({"naive": "x", "P": None}, [1], None):
        history.say(1.0, events.DMR_COVERED, rank=0, step=1, strategy=None, counts=counts)
    for blamed in (None, 3, ["x"]):
        told = {"action": "evict", "reason": None, "ranks": None, "blamed": blamed}
        history.say(2.1, events.DMR_VERDICT, step=3, attempt=values["attempt"], **told)
    found = corruption(history.events)
    assert found.rows
    report(write(tmp_path / "a", history, steps=9), capsys)
