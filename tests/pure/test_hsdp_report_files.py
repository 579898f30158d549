"""`ft report` and `ft status` on the folder of an FT-HSDP run, and on that of one replica of it."""

import json
import os
import time

import pytest
from hsdp_runs import Run, eventful
from record_conversations import Page

from ft import cli
from ft.base import events
from ft.observe.report import status
from ft.platform import election, processes


def report(folder, capsys) -> tuple[str, Page]:
    """Run `ft report`; return what it printed, and the page."""
    assert cli.main(["report", str(folder)]) == 0
    return capsys.readouterr().out, Page(folder / "report.html")


def small(folder) -> Run:
    run = Run(folder, step_s=0.1)
    run.steps(12)
    run.step(by=set(), took=0.4)
    run.dies(1)
    run.steps(1)
    run.builds(1)
    run.steps(5)
    run.returns(1)
    run.steps(12)
    return run


def test_what_happened_inside_the_replicas_is_reported_and_hostile_text_is_only_text(tmp_path, capsys):
    """Recoveries, mismatches, rebuilt stages and actions of each replica, with markup in every text of the files."""
    run, hostile = small(tmp_path), "</td><script>alert(1)</script><img src=http://evil>"
    place = {"node": hostile, "worker": hostile, "rank": 0, "epoch": 0, "step": 3}
    gravity = {"category": hostile, "action": "replace", "signal": hostile, "reason": hostile}
    run.own(1, events.FAULT_DETECTED, **place, **gravity)
    run.own(1, events.EPOCH_CLOSED, epoch=0, reason=hostile)
    run.own(1, events.EPOCH_OPENED, epoch=1, seats={"0": hostile}, joiners=[0], fresh=False)
    run.own(1, events.RESUMED, epoch=1, step=3)
    run.own(0, events.DMR_COVERED, rank=0, epoch=0, step=1, strategy=hostile, counts={hostile: 3})
    values = {"operator": hostile, "phase": hostile, "host": hostile, "device": hostile, "how": hostile}
    told = {"layer": 1, "microbatch": 0, "elements": 1, "of": 2, "attempt": 1, "note": "", "chunk": 0, "index": 0}
    run.own(0, events.DMR_MISMATCH, rank=0, epoch=0, step=3, **values, **told)
    run.own(0, events.STAGE_REBUILT, epoch=0, step=3, stage=1, strategy=hostile, weights=[1.0], seconds=0.1)
    run.own(2, events.PROTECTION_ACTED, rank=0, step=4, protection=hostile, what=hostile)
    run.server(events.REPLICA_OFFLINE, replica=1, reason=hostile)
    run.finish()
    said, page = report(tmp_path, capsys)
    assert "recovered  1 of 1 interruption inside replicas" in said and "DMR        replica 0: " in said
    assert page.tags.count("img") == 1, "the timeline"
    text = " ".join(page.lines)
    for words in ("Recoveries", "Operators whose two executions", "Other protections", "rebuilt from their neighbours"):
        assert words in text, words
    assert text.count(hostile) > 10


@pytest.mark.parametrize("seed", range(3))
def test_reports_of_whatever_happens(seed, tmp_path, capsys):
    eventful(tmp_path, seed)
    report(tmp_path, capsys)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0


def test_status_as_json_and_watching_to_the_end(tmp_path, capsys):
    run = small(tmp_path)
    run.now = time.time() - 1_700_000_000.0
    run.step()
    run.close()
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["healthy"], said["ended"], said["stale"]) == (31, [0, 1, 2], False, False)
    assert [member["state"] for member in said["replicas"]] == ["online"] * 3
    run.finish()
    assert cli.main(["status", str(tmp_path), "--watch"]) == 0
    assert "finished" in capsys.readouterr().out


def test_status_ends_with_1_where_the_launcher_is_dead(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(status, "_SUCCESSION_S", 0.1)
    run = small(tmp_path)
    run.close()
    (tmp_path / "launchers").mkdir()
    record = election.LeaseRecord(0, 0, "", "n0", 1, launcher=processes.identity(os.getpid()))
    election.renew(tmp_path / "launchers", record)
    assert cli.main(["status", str(tmp_path)]) == 0
    gone = processes.identity(os.getpid()) + "0"  # a process of this host that began at another time
    election.renew(tmp_path / "launchers", election.LeaseRecord(0, 0, "", "n0", 1, launcher=gone))
    assert cli.main(["status", str(tmp_path), "--watch"]) == 1
    said = capsys.readouterr().out
    assert "gone (it was training)" in said and "the process ft run on this host has disappeared" in said
