"""`ft report` and `ft status` on run folders of all sorts: whole, torn, empty, still going."""

import json
import os
import subprocess
import time
from html.parser import HTMLParser

import pytest
from histories import START, History, write

from ft import cli
from ft.base import events
from ft.observe.report import status
from ft.observe.report.record import rank_intervals
from ft.platform import election, processes
from ft.record.recoveries import recoveries
from ft.record.run import load

_VOID = {"meta", "img", "br", "link"}


class Strict(HTMLParser):
    """Checks that tags are nested; keeps texts, and whatever would be fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.foreign, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href") and not value.startswith("data:"):
                self.foreign.append(value)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def report(folder, capsys) -> tuple[str, Strict]:
    """Runs `ft report`; returns what it printed and the page, parsed."""
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.tmp"))
    page = Strict()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    assert page.foreign == []
    assert "script" not in page.tags
    return capsys.readouterr().out, page


def eventful() -> History:
    """One recovery of each sort."""
    history = History()
    history.replacement(5.0, rank=3, by="n0.w4", step=20)
    history.inject(8.0, 1, kind="exception")
    history.detect(8.01, 1, step=40, action="in place", signal="<script>alert(1)</script>")
    history.close(8.02)
    history.open(8.05)
    history.repair(8.1, 40)
    history.detect(10.0, 2, step=70)
    history.say(10.1, events.RESTARTED, number=1, reason="both copies of rank 2 are lost")
    history.seats = {rank: worker.replace("w", "v") for rank, worker in history.seats.items()}
    history.open(12.0)
    history.say(12.5, events.RESUMED, epoch=3, step=60)
    history.finish(16.0, 100)
    return history


def test_the_report_tells_the_whole_story(tmp_path, capsys):
    folder = write(tmp_path / "a", eventful(), steps=100)
    said, page = report(folder, capsys)
    text = " ".join(page.texts)
    for words in (
        *("3 of 3 interruptions, 1 replaced, 1 in place, 1 restart", "goodput", "66.7 % of 15.0 s"),
        *("by the paper's formula with a failure every 5.00 s", "with one every 18 min"),
        *(
            "worker n0.w3 (logical rank 3, node n0): SIGKILL",
            "rank 3: n0.w3 -> n0.w4",
            "9 of 54 groups",
            "until the last survivor had left",
        ),
        *("replaced", "in place", "restart", "every worker was restarted", "2 faults injected"),
        *("pretrain_gpt.py", "<b>&", "<script>alert(1)</script>", "epoch_opened", "finished"),
    ):
        assert words in text, words
    assert "3 of 3 interruptions" in said
    assert str(folder / "report.html") in said and str(folder / "timeline.png") in said


def test_a_device_that_is_out_of_use_is_named(tmp_path, capsys):
    history = History()
    history.say(4.0, events.DEVICE_UNUSABLE, node="n1", device=3, reason="n1.w3 has not released it within 30 s")
    history.finish(11.0, 100)
    _, page = report(write(tmp_path / "a", history, steps=100), capsys)
    assert "device 3 of n1 not used any more: n1.w3 has not released it within 30 s" in " ".join(page.texts)


def test_a_run_without_a_fault(tmp_path, capsys):
    history = History()
    history.finish(11.0, 100)
    _, page = report(write(tmp_path / "a", history, steps=100), capsys)
    assert "Nothing interrupted this run." in page.texts
    assert "100.0 %" in page.texts


def test_a_run_that_has_not_ended_with_torn_lines_everywhere(tmp_path, capsys):
    history = eventful()
    history.events = history.events[:8]
    folder = write(tmp_path / "a", history, steps=30)
    for name in ("events.jsonl", "metrics.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + content[:40])
    (folder / "status.json").write_text('{"phase": "clo')
    (folder / "journal.jsonl").write_text('{"a": 1}\n{"b"')
    said, page = report(folder, capsys)
    assert "under way" in said
    assert "not ended" in " ".join(page.texts)
    for name in ("events.jsonl", "metrics.jsonl", "journal.jsonl"):
        assert f"{name} has 1 damaged line(s), which are ignored" in said


def test_steps_that_found_no_room_are_named(tmp_path, capsys):
    """The newest step is the run's, not that of the last line that was written."""
    history = History()
    history.finish(9.0, 30)
    folder = write(tmp_path / "a", history, steps=20)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4] + lines[5:12] + lines[13:]))
    control_says(folder, step=20)
    lack = "metrics.jsonl lacks 12 of 30 steps: 5, 13, 21 to 30"
    assert lack in report(folder, capsys)[0]
    assert cli.main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert lack in said and "step       30" in said
    assert cli.main(["status", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["lacking"] == [lack]
    (folder / "metrics.jsonl").unlink()
    assert "lacks" not in report(folder, capsys)[0]


@pytest.mark.parametrize("left", [["events.jsonl"], ["metrics.jsonl"], ["status.json"]])
def test_whatever_is_left_is_reported(left, tmp_path, capsys):
    folder = write(tmp_path / "a", eventful(), steps=5)
    (folder / "status.json").write_text("{}")
    for file in folder.iterdir():
        if file.name not in left:
            file.unlink()
    report(folder, capsys)
    assert cli.main(["status", str(folder)]) == 0


def test_empty_files(tmp_path, capsys):
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).touch()
    _, page = report(tmp_path, capsys)
    assert "No events." in page.texts


def test_odd_metrics(tmp_path, capsys):
    folder = write(tmp_path / "a", History())
    lines = [
        {"step": 1, "loss": float("nan")},
        {"step": 2},
        {"loss": 3.0},
        {"step": 3, "loss": 4.0, "step_time_s": None},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n[1]\n3\n")
    report(folder, capsys)


def test_many_ranks_and_many_recoveries(tmp_path, capsys):
    history = History(32)
    for i in range(40):
        history.replacement(2.0 + i, rank=i % 32, by=f"n1.w{i}", step=10 * i)
    history.finish(50.0, 500)
    _, page = report(write(tmp_path / "a", history, steps=500), capsys)
    assert "40" in page.texts


@pytest.mark.parametrize("command", ["report", "status"])
@pytest.mark.parametrize("kind", ["missing", "file", "empty folder"])
def test_no_run_is_a_users_error(command, kind, tmp_path, capsys):
    path = tmp_path / "nothing"
    if kind == "file":
        path.touch()
    elif kind == "empty folder":
        path.mkdir()
    assert cli.main([command, str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "--run-dir" in said


def test_tenures_end_at_the_fault():
    history = eventful()
    held = rank_intervals(history.events, recoveries(history.events))
    third = [(t.worker, round(t.begin, 2), round(t.end, 2), t.is_first) for t in held if t.rank == 3]
    assert third == [("n0.w3", 0.0, 4.0, True), ("n0.w4", 4.03, 9.0, False), ("n0.v4", 11.0, 15.0, True)]


def control_says(folder, age_s: float = 0.5, **values) -> None:
    beat = {"age_s": 0.1, "epoch": 1, "step": 19, "doing": "wait", "since_s": 0.2, "where": "dp group", "lag": 1}
    seat = {"worker": "n0.w0", "node": "n0", "pid": 7}
    status = {
        **{"updated": time.time() - age_s, "phase": "running", "epoch": 1, "step": 20, "restarts": 0, "lag": 1},
        "seats": {"10": {**seat, "worker": "n0.w10"}, "2": {**seat, "beat": beat}},
        "standbys": [{"worker": "n0.w5", "node": "n0", "pid": 9}],
    }
    (folder / "status.json").write_text(json.dumps({**status, **values}))


def test_status_of_a_run_under_way(tmp_path, capsys):
    history = History()
    history.replacement(5.0, rank=3, by="n0.w4", step=20)
    folder = write(tmp_path / "a", history, steps=21)
    control_says(folder)
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert "running, updated 5" in text
    assert "stale" not in text
    assert "1 behind the committed step" in text
    assert "recovery 1, replaced in 400 ms" in text
    members = [line.split() for line in lines[lines.index("") + 3 :]]
    assert members == [
        ["2", "n0.w0", "n0", "wait:", "dp", "group", "19", "1"],
        ["10", "n0.w10", "n0", "training", "-", "-"],
        ["standby", "n0.w5", "n0", "standby", "-", "-"],
    ]


def lost_a_node(folder) -> None:
    history = History()
    for rank, node in enumerate(("n0", "n1", "n2")):
        history.join(0.1, node, f"gpu{rank}")
    history.seats["3"] = "n1.w0"
    history.lose_node(5.0, "n1", 3, named="n1 (gpu1)")
    history.close(5.0)
    history.open(5.1, r3="n2.w0")
    history.repair(5.2, 20)
    history.join(9.0, "n1-2", "gpu1")
    write(folder, history, steps=21)
    seats = {"0": {"worker": "n0.w0", "node": "n0"}, "3": {"worker": "n2.w0", "node": "n2"}}
    nodes = {"n0": "up", "n1": "silent", "n3": "its agent has ended", "n2": "suspect: slow"}
    control_says(folder, seats=seats, nodes=nodes, updated=START + 125)


def test_status_names_hosts_and_lists_lost_nodes(tmp_path, capsys, monkeypatch):
    lost_a_node(tmp_path)
    monkeypatch.setattr(time, "time", lambda: START + 125)
    assert cli.main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    why = "nothing was heard of its agent for 3.7 s"
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("lost ")] == [
        f"n1 (gpu1), 2 min 00 s ago: {why}; joined again as n1-2",
        "n3: its agent has ended",
    ]
    assert next(line for line in lines if line.startswith("last")).endswith(f": node n1 (gpu1) is lost: {why}")
    assert any("n2.w0" in line and "n2 (gpu2)" in line for line in lines)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(m["node"], m["host"]) for m in said["members"]] == [("n0", "gpu0"), ("n2", "gpu2"), ("n0", "gpu0")]
    n1 = {"node": "n1", "host": "gpu1"}
    assert said["lost"][0] == {**n1, "reason": why, "lost_s_ago": 120.0, "back_as": "n1-2"}
    assert (said["last_recovery"]["node"], said["last_recovery"]["host"]) == ("n1", "gpu1")
    assert said["hosts"] == {"n0": "gpu0", "n1": "gpu1", "n2": "gpu2", "n1-2": "gpu1"}


def test_the_report_names_hosts_and_lost_nodes(tmp_path, capsys):
    lost_a_node(tmp_path)
    said, found = report(tmp_path, capsys)
    assert "node n1 (gpu1) is lost, with logical rank 3" in said
    assert "n1 (gpu1): nothing was heard of its agent for 3.7 s; joined again as n1-2" in found.texts
    assert any(text.startswith("node n1 (gpu1), worker n1.w0") for text in found.texts) and "node n2" in found.texts


def test_status_as_json_and_stale(tmp_path, capsys):
    folder = write(tmp_path / "a", History(), steps=21)
    control_says(folder, age_s=100.0)
    assert cli.main(["status", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["stale"] and not said["ended"]
    assert said["updated_s_ago"] > 99
    assert (said["phase"], said["epoch"], said["step"], said["lag"], said["last_recovery"]) == (
        "running",
        1,
        20,
        1,
        None,
    )
    assert [member["rank"] for member in said["members"]] == [2, 10, None]
    assert cli.main(["status", str(folder)]) == 0
    assert "(stale?)" in capsys.readouterr().out


def test_status_of_a_finished_run_is_its_end_and_not_the_last_heartbeats(tmp_path, capsys):
    history = History()
    history.finish(9.0, 20)
    folder = write(tmp_path / "a", history, steps=20)
    control_says(folder, phase="ended", protected=True)
    assert cli.main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("behind" in line for line in lines)
    members = [line.split() for line in lines[lines.index("") + 3 :]]
    assert members == [
        ["2", "n0.w0", "n0", "finished", "20", "-"],
        ["10", "n0.w10", "n0", "finished", "20", "-"],
        ["standby", "n0.w5", "n0", "finished", "-", "-"],
    ]


def test_status_of_a_stopped_run_says_where_its_workers_were_last_seen(tmp_path, capsys):
    history = History()
    history.say(9.0, events.STOPPED, code=1, message="a bug")
    folder = write(tmp_path / "a", history, steps=20)
    control_says(folder, phase="ended", protected=True)
    assert cli.main(["status", str(folder)]) == 0
    assert "ended (last seen: wait: dp group)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"protected": False, "lag": None}, "none: no worker has joined the run, and nothing protects it"),
        ({"protected": True, "hot_swap": False, "lag": None}, "none: the other replicas hold the state"),
        ({"protected": True, "hot_swap": True, "lag": 0}, "all peers hold the committed step"),
    ],
)
def test_status_claims_no_copies_that_were_never_made(values, says, tmp_path, capsys):
    folder = write(tmp_path / "a", History(), steps=3)
    control_says(folder, **values)
    assert cli.main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert says in said and said.count("peers hold") == (values["lag"] == 0)


def test_a_file_of_metrics_of_something_else_is_no_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"accuracy": 0.9}\n')
    for command in ("status", "report"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert "contains no run" in capsys.readouterr().err


def dead_process() -> str:
    """The identity of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    known = processes.identity(process.pid)
    process.kill()
    process.wait()
    return known


@pytest.mark.parametrize("extra", [[], ["--watch"], ["--json"]])
def test_status_ends_with_1_where_the_launcher_is_dead(extra, tmp_path, capsys):
    folder = write(tmp_path / "a", History(), steps=3)
    control_says(folder, nodes={"n0": "up"})
    election.renew(folder, election.LeaseRecord(0, 0, "", "n0", 1, launcher=processes.identity(os.getpid())))
    assert cli.main(["status", str(folder)]) == 0
    election.renew(folder, election.LeaseRecord(0, 0, "", "n0", 1, launcher=dead_process()))
    assert cli.main(["status", str(folder), *extra]) == 1
    assert "the process ft run on this host has disappeared" in capsys.readouterr().out


def test_who_has_the_lease_elsewhere_is_gone_after_a_while_without_a_renewal(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_SUCCESSION_S", 0.1)
    elsewhere = "another-boot 7 99"
    election.renew(tmp_path, election.LeaseRecord(0, 0, "", "n0", 1, launcher=elsewhere))
    assert status.gone(tmp_path, 10.0, 2) == "", "another one may be taking over"
    assert "no process renews the lease" in status.gone(tmp_path, status.GONE_S + 1, 2)
    assert "no process renews the lease" in status.gone(tmp_path, None, 2, is_steady=True)
    assert status.gone(tmp_path / "nowhere", 1000.0, 1) == "", "no lease was ever taken"


def test_watching_ends_with_the_run(tmp_path, capsys):
    folder = write(tmp_path / "a", eventful(), steps=3)
    assert cli.main(["status", str(folder), "--watch"]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "values",
    [
        {"seats": [], "standbys": {"n0.w5": {"node": "n0"}, "n0.w6": None}},
        {"seats": {"x": None, "1": "n0.w1"}, "standbys": ["n0.w9"]},
        {"seats": None, "standbys": None, "epoch": "soon", "step": None, "lag": None, "updated": "noon"},
    ],
)
def test_status_takes_what_it_gets(values, tmp_path, capsys):
    folder = write(tmp_path / "a", History(), steps=3)
    control_says(folder, **values)
    assert cli.main(["status", str(folder)]) == 0
    assert cli.main(["status", str(folder), "--json"]) == 0


def test_events_are_put_in_the_order_of_time(tmp_path):
    history = History()
    history.say(9.0, events.RESUMED, epoch=1, step=80)
    history.say(5.0, events.RESUMED, epoch=1, step=40)
    found = load(write(tmp_path / "a", history)).events
    assert [event.wall - START for event in found if event.step is not None][-2:] == [5.0, 9.0]


def test_what_nodes_found_about_themselves_is_named(tmp_path, capsys):
    history = History()
    for number in range(7):
        said = {
            "observation": "xid.31",
            "category": "c",
            "action": "watch",
            "advice": "Look.",
            "reason": f"no {number}",
        }
        history.say(4.0 + number, events.HEALTH_FOUND, node="n1", device="gpu3", **said)
    history.finish(11.0, 100)
    folder = write(tmp_path / "a", history, steps=100)
    _, page = report(folder, capsys)
    assert "n1 gpu3: watch: no 0" in page.texts and "n1 gpu3: watch: no 6" in page.texts
    assert cli.main(["status", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "health     n1 gpu3: watch: no 6" in text and "no 1\n" not in text and "and 2 earlier" in text
    assert cli.main(["status", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["health"]) == 7
