"""``ft diagnose silent``: which devices have computed wrongly, from event files made by hand."""

import json

import pytest
from histories import History, write

from ft import cli
from ft.base import events
from ft.observe.diagnose.silent import LINK, OPERATOR, PULL, WATCH
from ft.platform import suspects


class Checked(History):
    """A run with double execution."""

    def wrong(self, step: int, rank: int, where: tuple[str, str], operator: str = "mm", **more) -> None:
        told = {"operator": operator, "phase": "forward", "layer": 1, "microbatch": 0, "how": "at once", **more}
        place = dict(zip(("host", "device"), where, strict=True))
        self.say(step, events.DMR_MISMATCH, rank=rank, epoch=0, step=step, attempt=1, **told, **place)

    def then(self, step: int, action: str, blamed=()) -> None:
        values = {"attempt": 1, "action": action, "reason": "it went wrong", "ranks": [], "blamed": list(blamed)}
        self.say(step + 0.1, events.DMR_VERDICT, epoch=0, step=step, **values)
        if action == "retry":
            self.say(step + 0.2, events.DMR_CLEAN, epoch=0, step=step, attempt=2)


BAD, ONCE, LINKED = ("n1", "cuda:3"), ("n2", "cuda:0"), ("n3", "cuda:1")


def first() -> Checked:
    run = Checked()
    for step in (5, 9):
        run.wrong(step, 1, BAD)
        run.wrong(step, 1, BAD, "native_layer_norm")
        run.then(step, "retry")
    run.wrong(12, 2, ONCE, "<add>")
    run.then(12, "retry")
    for step in (20, 21):
        run.wrong(step, 3, LINKED, "p2p", how="what was sent")
        run.then(step, "retry")
    return run


def second() -> Checked:
    run = Checked()
    run.wrong(7, 0, BAD)
    run.then(7, "evict", [0])
    for rank, host in enumerate(("n4", "n5", "n6")):
        run.wrong(30, rank, (host, "cuda:0"), "index_put_")
    run.then(30, "give up")
    return run


@pytest.fixture
def folders(tmp_path):
    for name, history in (("a", first()), ("b", second())):
        write(tmp_path / name, history)
    lines = [json.dumps({"step": step, "dmr_coverage": share}) for step, share in ((1, 1.0), (2, 0.75), (3, 1.0))]
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / name) for name in "ab"]


def as_json(capsys, *folders: str) -> tuple[int, dict]:
    code = cli.main(["diagnose", "silent", *folders, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_devices_are_told_apart_by_what_happened_on_them(folders, capsys):
    code, found = as_json(capsys, *folders)
    assert code == 1
    advice = {(one["host"], one["device"]): one["advice"] for one in found["devices"]}
    others = {(host, "cuda:0"): OPERATOR for host in ("n4", "n5", "n6")}
    assert advice == {BAD: PULL, LINKED: LINK, ONCE: WATCH, **others}
    bad = found["devices"][0]
    assert (bad["host"], bad["mismatches"], bad["evicted"], bad["corrected"]) == ("n1", 5, 1, 2)
    assert bad["operators"] == {"mm": 3, "native_layer_norm": 2} and bad["ranks"] == [0, 1]
    assert bad["steps"] == [[folders[0], 5], [folders[0], 9], [folders[1], 7]]
    assert found["not_reproducible"] == {"index_put_": [[host, "cuda:0"] for host in ("n4", "n5", "n6")]}
    assert [one["least_coverage"] for one in found["runs"]] == [[0.75, 2], None]
    assert all(one["ended_runs"] == 1 for one in found["devices"] if one["advice"] == OPERATOR)


def test_the_text_says_whom_to_pull(folders, capsys):
    assert cli.main(["diagnose", "silent", *folders]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("2 runs\nleast coverage: 75.00% of the operators, in step 2 of " + folders[0])
    assert shown.rstrip().endswith("pull: n1")
    assert "pull " in shown and "mm (3), native_layer_norm (2)" in shown and "2 corrected, 1 evicted" in shown
    assert "index_put_ differed on 3 devices: it is not reproducible there" in shown


def test_replicas_are_read_each_by_itself(tmp_path, capsys):
    for replica, history in enumerate((first(), second())):
        write(tmp_path / f"run/replica-{replica}", history)
    _, found = as_json(capsys, str(tmp_path / "run"))
    assert [one["run"] for one in found["runs"]] == [str(tmp_path / f"run/replica-{n}") for n in (0, 1)]
    assert found["devices"][0]["host"] == "n1"


def test_without_mismatches_there_is_nothing_to_do(tmp_path, capsys):
    write(tmp_path / "quiet", Checked())
    assert cli.main(["diagnose", "silent", str(tmp_path / "quiet")]) == 0
    assert "no mismatch is on record" in capsys.readouterr().out
    assert cli.main(["diagnose", "silent", str(tmp_path / "nothing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_devices_to_pull_and_to_watch_are_added_to_a_file_for_the_next_run(folders, tmp_path, capsys):
    path = tmp_path / "suspects.json"
    assert cli.main(["diagnose", "silent", folders[0], "--out", str(path)]) == 1
    assert f"{path} has 2 device(s) now, 1 of them to pull" in capsys.readouterr().out
    for _ in range(2):  # the same runs again count nothing twice
        cli.main(["diagnose", "silent", folders[1], "--out", str(path)])
        cli.main(["diagnose", "silent", *folders, "--out", str(path), "--json"])
    bad, once = suspects.read(path)
    assert (bad.host, bad.device, bad.advice) == (
        "n1",
        3,
        PULL,
    ) and bad.why == "wrong in 3 steps of 2 runs, evicted 1 time"
    assert bad.runs == {folders[0]: suspects.Counts(2, 4, 0), folders[1]: suspects.Counts(1, 1, 1)}
    assert (once.host, once.device, once.advice) == ("n2", 0, WATCH)


def test_a_processor_is_the_whole_host_and_a_wrong_file_is_told_before_anything_is_written(tmp_path, capsys):
    run, path = Checked(), tmp_path / "suspects.json"
    for step in (3, 4):
        run.wrong(step, 0, ("n7", "cpu"))
    write(tmp_path / "c", run)
    cli.main(["diagnose", "silent", str(tmp_path / "c"), "--out", str(path)])
    assert [(one.host, one.device, one.advice) for one in suspects.read(path)] == [("n7", None, PULL)]
    path.write_text("[]")
    assert cli.main(["diagnose", "silent", str(tmp_path / "c"), "--out", str(path)]) == 2
    assert 'has no "format"' in capsys.readouterr().err and path.read_text() == "[]"
