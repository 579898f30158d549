"""What ``ft`` imports: a launcher does not wait for torch, nor for the planners' solvers."""

import subprocess
import sys
from pathlib import Path

import pytest

from ft import cli

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "scipy", "matplotlib", "megatron.core")


@pytest.mark.parametrize("subcommand", ["run", "status", "faults"])
def test_a_subcommand_brings_no_library_that_it_does_not_need(subcommand):
    code = f"""
import sys
from ft import cli
try:
    cli.main([{subcommand!r}, "--help"])
except SystemExit:
    pass
sys.stderr.write(", ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert not done.stderr, f"ft {subcommand} imports {done.stderr}"


def test_every_subcommand_is_found_by_its_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    offered = capsys.readouterr().out
    for names, *_ in cli._SUBCOMMANDS:
        for name in names:
            assert f"    {name} " in offered
            with pytest.raises(SystemExit) as end:
                cli.main([name, "--help"])
            assert end.value.code == 0
