"""The commands of the README, as processes of their own."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import small_runs as runs
from checkpoint_flips import poison
from pythons import environment, python


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    done = python(*words)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the dataset, metrics and checkpoint of a short run under torchrun, and its output."""
    folder = tmp_path_factory.mktemp("run")
    corpus = runs.make_corpus(folder)
    flags = f"{runs.BASE} --data-path {corpus} --save {folder}/ck --metrics-file {folder}/m.jsonl --log-interval 1"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py"]
    return folder, run(*words, "--pipeline-model-parallel-size", "2", *flags.split())


def test_torchrun_trains_quietly(trained):
    folder, done = trained
    assert "iteration        4/       4" in done.stdout
    assert len(runs.losses(folder / "m.jsonl")) == 4
    noise = [line for line in done.stderr.splitlines() if "warn" in line.lower()]
    assert noise == []


def test_a_sample_is_written_from_the_checkpoint(trained):
    folder, _ = trained
    done = run("tools/generate_text.py", "--load", str(folder / "ck"), "--prompt", "import ", "--tokens", "20")
    assert done.stdout.startswith("import ")
    again = run("tools/generate_text.py", "--load", str(folder / "ck"), "--prompt", "import ", "--tokens", "20")
    assert again.stdout == done.stdout


def test_a_command_that_loads_a_checkpoint_executes_nothing_in_it(trained, tmp_path):
    (checkpoint,) = shutil.copytree(trained[0] / "ck", tmp_path / "ck").glob("iter_*")
    poison(checkpoint, "common.pt", tmp_path / "was-executed")
    done = run("tools/generate_text.py", "--load", str(tmp_path / "ck"), check=False)
    listed = run("-m", "megatron.ft_trainer.checkpointing", "verify", str(tmp_path / "ck"))
    assert not (tmp_path / "was-executed").exists()
    assert "ok" in listed.stdout
    assert done.returncode == 2 and "mkdir" in done.stderr and "Traceback" not in done.stderr


def test_the_loss_curve_is_drawn(trained):
    folder, _ = trained
    picture = folder / "loss.png"
    inputs = ["--metrics", f"{folder}/m.jsonl", "--dataset", f"{folder}/corpus"]
    run("tools/plot_loss.py", *inputs, "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pretrain_gpt.py", "--reference-trainer", "--hiden-size", "3"], "did you mean --hidden-size?"),
        (["tools/generate_text.py", "--load", "nowhere"], "no complete checkpoint"),
        (["tools/plot_loss.py", "--metrics", "nowhere", "--output", "x.png"], "nowhere"),
    ],
)
def test_bad_input_ends_with_one_message_and_status_2(words, part):
    done = run(*words, check=False)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_concern():
    done = run("pretrain_gpt.py", "--reference-trainer", "--help")
    for title in ("megatron-core: model, experts, precision", "checkpointing", "data and dataloader"):
        assert title in done.stdout


def test_ft_ends_quietly_when_nobody_reads_its_output_any_more():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ft", "plan", "policy"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment(), text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_another_broken_pipe_is_not_taken_for_a_reader_that_has_gone(monkeypatch):
    from ft import cli

    def breaks(_given):
        raise BrokenPipeError("a socket's")

    monkeypatch.setattr("ft.lab.plan.policy.run", breaks)
    with pytest.raises(BrokenPipeError, match="a socket's"):
        cli.main(["plan", "policy"])
