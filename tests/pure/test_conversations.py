"""Decisions of the control plane and of the quorum server, and what is told of recoveries and hangs: conversations.

The files are in ``tests/pure/conversations``.

``CONVERSATIONS=write`` writes what is decided into the files, to be read and committed.
"""

import os

import pytest
from conversations import ROOT, Hang, Quorum, Recoveries, Run, replay

PLAYERS = {"recovery": Run, "quorum": Quorum, "report": Recoveries, "hang": Hang}
FILES = sorted(ROOT.glob("*/*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_conversation_goes_as_it_is_written(file):
    text = file.read_text()
    found = replay(text, PLAYERS[file.parent.name]())
    if os.environ.get("CONVERSATIONS") == "write":
        file.write_text(found)
        return
    assert found == text


def test_the_conversations_are_there():
    assert len(FILES) >= 20
