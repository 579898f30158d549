"""Files that lines are appended to, on disks that are full and after crashes."""

import os
from pathlib import Path

import pytest

from ft.base import lines
from ft.base.lines import Lines
from ft.job.control.journal import Journal, recall
from ft.job.control.state import ControlOptions


@pytest.fixture
def full(monkeypatch):
    """A switch: while it is set, three bytes of each write find room at most, then none."""
    room, write = {"bytes": None}, os.write

    def limited(descriptor, data):
        if room["bytes"] is None:
            return write(descriptor, data)
        if room["bytes"] == 0:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room["bytes"]])
        room["bytes"] -= written
        return written

    monkeypatch.setattr(lines.os, "write", limited)
    return room


def test_what_finds_no_room_is_written_once_there_is_some(tmp_path, full):
    told = []
    file = Lines(tmp_path / "a", tell=told.append)
    file.write(b"one\n")
    full["bytes"] = 3
    file.write(b"two, long\n")
    assert (tmp_path / "a").read_bytes() == b"one\n"
    file.write(b"three\n")
    assert len(told) == 1
    assert "a cannot be written (No space left on device)" in told[0] and "free space" in told[0]
    full["bytes"] = None
    file.write(b"four\n")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"one\ntwo, long\nthree\nfour\n"
    assert told[1:] == [f"{tmp_path / 'a'} can be written again: 2 lines that waited were written, 0 are lost"]


def test_lines_wait_in_bounded_memory(tmp_path, full):
    told = []
    file = Lines(tmp_path / "a", most=3, tell=told.append)
    full["bytes"] = 2
    for number in range(9):
        file.write(b"line %d\n" % number)
    full["bytes"] = None
    file.close()
    assert (tmp_path / "a").read_bytes() == b"line 6\nline 7\nline 8\n"
    assert file.lost == 6 and "has lost 6 lines" in told[-1]


def test_lines_that_never_find_room_are_told_at_the_end(tmp_path, full, capsys):
    file = Lines(tmp_path / "a")
    file.write(b"one\n")
    full["bytes"] = 2
    file.write(b"two\n")
    file.write(b"three\n")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"one\n"
    assert (
        "has lost 2 lines, because the disk had no space for them (No space left on device)" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("fits", "before", "after"),
    [(3, b"one\ntwo", b"one\ntwo\ntwo, long\n"), (9, b"one\ntwo, long", b"one\ntwo, long\n")],
)
def test_in_a_file_that_others_write_too_nothing_is_taken_off(tmp_path, full, fits, before, after):
    file = Lines(tmp_path / "a", is_shared=True)
    file.write(b"one\n")
    full["bytes"] = fits
    file.write(b"two, long\n")
    assert (tmp_path / "a").read_bytes() == before
    full["bytes"] = None
    file.close()
    assert (tmp_path / "a").read_bytes() == after and file.lost == 0


def test_what_another_has_written_meanwhile_is_not_taken_off(tmp_path, full, monkeypatch):
    file, other = Lines(tmp_path / "a"), os.open(tmp_path / "a", os.O_WRONLY | os.O_APPEND)
    write, full["bytes"] = lines.os.write, 3

    def interrupted(descriptor, data):
        written = write(descriptor, data)
        full["bytes"] = None
        monkeypatch.setattr(lines.os, "write", write)
        os.write(other, b"\nother\n")
        return written

    monkeypatch.setattr(lines.os, "write", interrupted)
    file.write(b"two, long\n")
    file.close()
    os.close(other)
    assert (tmp_path / "a").read_bytes() == b"two\nother\n\ntwo, long\n"


def test_a_torn_line_is_ended(tmp_path):
    (tmp_path / "a").write_bytes(b"whole\nto")
    file = Lines(tmp_path / "a")
    file.write(b"next\n")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"whole\nto\nnext\n"


def test_a_journal_on_a_full_disk_is_whole_once_there_is_room(tmp_path, full):
    journal = Journal(tmp_path / "journal.jsonl", ControlOptions(nodes=1, world_size=2))
    full["bytes"] = 3
    for number in range(5):
        journal.remark(f"remark {number}")
    full["bytes"] = None
    journal.remark("room again")
    journal.close()
    assert recall(tmp_path / "journal.jsonl").state.options.world_size == 2
    assert (tmp_path / "journal.jsonl").read_text().count("remark ") == 5


def test_a_disk_that_was_never_anything_but_full():
    journal = Journal(Path("/dev/full"), ControlOptions(nodes=1, world_size=1))
    journal.remark("kept in memory")
    journal.close()
