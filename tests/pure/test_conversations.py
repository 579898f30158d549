"""Decisions, what flags lead to, what plans say, what functions return, and what is told of runs and faults, as text.

The files are in ``tests/pure/conversations``.

``CONVERSATIONS=write`` writes what is decided into the files, to be read and committed.
"""

import os
import time

import pytest
from conversations import ROOT, Quorum, Run, replay
from hsdp_conversations import PLAYERS as REPLICATED
from judgement_conversations import PLAYERS as JUDGED
from ladder_conversations import PLAYERS as LADDER
from launch_conversations import PLAYERS as STARTED
from part_conversations import PLAYERS as PARTS
from record_conversations import Hang, Record, Recoveries, Traces
from trainer_conversations import PLAYERS as TRAINED
from value_conversations import PLAYERS as VALUED
from worker_conversations import PLAYERS as WORKING

PLAYERS = {
    **{"recovery": Run, "quorum": Quorum, "report": Recoveries, "hang": Hang, "record": Record},
    "traces": Traces,
    **JUDGED,
    **LADDER,
    **PARTS,
    **REPLICATED,
    **STARTED,
    **TRAINED,
    **VALUED,
    **WORKING,
}
FILES = sorted(ROOT.glob("*/*.txt"))


@pytest.fixture
def in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_utc")
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_conversation_goes_as_it_is_written(file, tmp_path):
    text = file.read_text()
    found = replay(text, PLAYERS[file.parent.name](tmp_path))
    if os.environ.get("CONVERSATIONS") == "write":
        file.write_text(found)
        return
    assert found == text


def test_the_conversations_are_there():
    assert len(FILES) >= 20
