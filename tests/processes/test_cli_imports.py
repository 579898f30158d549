"""What ``ft`` imports: a launcher does not wait for torch, nor for the planners' solvers."""

import os
import re
from pathlib import Path

import pytest
from pythons import python

from ft import cli

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "scipy", "matplotlib", "megatron.core")


@pytest.mark.parametrize("subcommand", ["run", "check", "status", "faults"])
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
    done = python("-c", code)
    assert not done.stderr, f"ft {subcommand} imports {done.stderr}"


def test_every_subcommand_is_found_by_its_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    offered = capsys.readouterr().out
    for names, *_ in cli._SUBCOMMANDS:
        for name in names:
            assert re.search(rf"^    {name}( |$)", offered, re.MULTILINE)
            with pytest.raises(SystemExit) as end:
                cli.main([name, "--help"])
            assert end.value.code == 0


def test_another_trainer_on_the_import_path_does_not_hide_this_one(tmp_path):
    """A checkout of Megatron-LM has a ``megatron.training``, and so has the wheel of megatron-core from 0.17 on."""
    other = tmp_path / "megatron" / "training"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('this is the other trainer')")
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --mock-data"
    sizes = "--train-iters 1 --lr 1e-3 --vocab-size 8 --tokenizer-type NullTokenizer --global-batch-size 1"
    for command in (
        ["-c", "import sys; from ft import cli; sys.exit(cli.main())", "check", str(ROOT / "pretrain_gpt.py")],
        [str(ROOT / "pretrain_gpt.py"), "--help"],
    ):
        first = os.pathsep.join(map(str, (tmp_path, ROOT)))
        done = python(*command, *flags.split(), *sizes.split(), folder=tmp_path, PYTHONPATH=first)
        assert done.returncode == 0, done.stdout + done.stderr
