"""How a worker's process ends, against how ``python`` ends the same script."""

import gzip
from pathlib import Path

import pytest
from pythons import python

AS_A_WORKER = "import sys; from ft.job.agent import warm; warm.leave(warm.run_script(sys.argv[1], False, []))"

SCRIPT = """
import atexit, ctypes, gzip, sys, threading, time
kept, packed, text = open("kept", "wb"), gzip.open("packed", "wt"), open("text", "w")
lives = threading.Event()
if DAEMON:
    threading.Thread(target=lives.wait, daemon=True).start()
over = threading.Event()
def goes_on():
    over.wait()
    kept.write(b"by a thread")
threading.Thread(target=goes_on).start()
def last():
    text.write("by an exit handler")
    raise ValueError("of an exit handler")
atexit.register(last)
packed.write("by the script")
ctypes.CDLL(None).printf(b"by C, ")
sys.stdout.write("by the script, ")
threading.Timer(0.01, over.set).start()
"""

ENDS = {
    "of itself": "",
    "status": "sys.exit(3)",
    "status above 255": "sys.exit(300)",
    "negative status": "sys.exit(-1)",
    "in words": "sys.exit('what it was')",
    "none": "raise SystemExit",
    "exception": "raise KeyError('which')",
    "closed output": "sys.stdout.flush(); sys.stdout.close(); sys.exit(4)",
    "full disk": "sys.stdout.flush(); import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost')",
}


def run(folder: Path, command: list[str], script: str) -> tuple:
    """(exit status, output, last line of the errors, what is in its files) of a script."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    done = python(*command, "script.py", folder=folder)
    packed = gzip.decompress((folder / "packed").read_bytes())
    files = [(folder / "kept").read_bytes(), (folder / "text").read_text(), packed]
    return done.returncode, done.stdout, done.stderr.splitlines()[-1:], files


@pytest.mark.parametrize(
    ("daemon", "end"), [*(("True", end) for end in ENDS), ("False", "status"), ("False", "exception")]
)
def test_a_worker_ends_as_python_does(tmp_path, daemon, end):
    script = SCRIPT.replace("DAEMON", daemon) + ENDS[end]
    expected = run(tmp_path / "python", [], script)
    assert expected[3] == [b"by a thread", "by an exit handler", b"by the script"]
    assert run(tmp_path / "worker", ["-c", AS_A_WORKER], script) == expected
