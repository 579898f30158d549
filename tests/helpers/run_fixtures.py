"""Fixtures of whole runs."""

import pytest


@pytest.fixture
def jobs():
    """Return a list for commands of :mod:`agent_jobs`: those in it are closed at the end, and have left no process."""
    begun = []
    yield begun
    for job in begun:
        job.close()


@pytest.fixture
def quick(tmp_path):
    """Return the flag for limits with which hangs are noticed soon."""
    (tmp_path / "limits.yaml").write_text("stall_s: 6\nsilent_s: 30\ncollective_s: 12\n")
    return f"--limits {tmp_path}/limits.yaml"
