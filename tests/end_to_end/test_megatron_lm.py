"""Runs of a Megatron-LM checkout's own trainer under ``ft run``: equal to plain torchrun's, bit for bit.

The checkouts are found by ``megatron_lm_trees``; without them the tests are skipped.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import megatron_lm_trees as checkouts
import numpy
import pytest
import small_runs
from agent_jobs import ft

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.hooks import own_flags
from megatron.ft_trainer.arguments import all_flags

RUNS = tomllib.loads(Path(__file__).with_name("megatron_lm.toml").read_text())
FLAGS = {name: f"{checkouts.BASE} {run['flags']}" for name, run in RUNS.items()}
TWO_STAGES = FLAGS["two-stages"]
LONG = pytest.mark.long


def faults(*texts: str, standby: int = 1) -> str:
    return " ".join([f"--standby {standby}", *(f"--inject {text}" for text in texts)])


def of_steps(plain: list[dict]) -> dict[int, tuple[str, str]]:
    """Return (loss, gradient norm) of each step of a run without protection, as hex floats."""
    return {line["step"]: (line["losses"]["lm loss"], line["grad_norm"]) for line in plain if "step" in line}


def of_run(folder) -> dict[int, tuple[str, str]]:
    """Return the same of a protected run."""
    found = checkouts.metrics(folder)
    return {step: (line["loss"].hex(), line["grad_norm"].hex()) for step, line in found.items()}


def equal(script, flags, folder, options, recoveries: int, protections: str = "", nvidias=None):
    """Train with and without faults, and compare all that is logged, bit for bit; return the protected run's output.

    Args:
        nvidias: the script of the run without faults; None: ``script``, too.
    """
    plain, shown = checkouts.plain(nvidias or script, flags.format(save=folder / "plain-save"), folder / "plain")
    done = checkouts.protected(script, flags.format(save=folder / "save"), folder / "run", options, protections)
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count("-- recovery ") == recoveries, done.stdout[-5000:]
    assert "differs from its first try" not in done.stdout, done.stdout[-5000:]
    assert of_run(folder / "run") == of_steps(plain)
    assert checkouts.log_lines(done.stdout) == checkouts.log_lines(shown)
    return done.stdout


@pytest.fixture
def corpus(tmp_path):
    return checkouts.write_corpus(tmp_path / "corpus")


NEWEST = pytest.param("0.19", marks=pytest.mark.newest)


@pytest.mark.parametrize("release", ["0.16", NEWEST, "0.20"])  # 0.20: a development tree, where one is there
def test_a_killed_worker_changes_nothing(tmp_path, release):
    script = checkouts.tree(release) / "pretrain_gpt.py"
    # --seed is a flag of ft run, too; in 0.19 it is made from a dataclass
    equal(script, f"{TWO_STAGES} --seed 7", tmp_path, faults("kill@step=5:rank=2"), recoveries=1)


@pytest.mark.parametrize("release", [NEWEST])  # 0.16 asks for NCCL's options with FSDP2
def test_workers_killed_in_any_phase_of_a_step_with_fsdp2_change_nothing(tmp_path, release):
    phases = "backward", "forward", "reduce", "optimizer", "transfer"
    planned = (f"kill@step={2 * i + 1}:rank={i % 4}:phase={phase}" for i, phase in enumerate(phases))
    script = checkouts.tree(release) / "pretrain_gpt.py"
    equal(script, FLAGS["fsdp2"], tmp_path, faults(*planned), recoveries=len(phases))


def flags_of(name: str, corpus, folder) -> str:
    return FLAGS[name].replace("{data}", str(corpus)).replace("{cache}", str(folder / "cache"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.newest if name == "llama" else LONG)
        for name, run in RUNS.items()
        if "installed" in run
    ],
)
def test_the_installed_trainer_computes_what_nvidias_script_does(tmp_path, corpus, name):
    """With this project's model, data and forward step, and with a fault; NVIDIA's script without either."""
    checkouts.installed()  # or the test is skipped; it is what the command of this project runs
    script, nvidias = checkouts.ROOT / "pretrain_gpt.py", checkouts.tree("0.19") / "pretrain_gpt.py"
    planned = faults(*RUNS[name]["installed"])
    equal(script, flags_of(name, corpus, tmp_path), tmp_path, planned, recoveries=1, nvidias=nvidias)


PARSER = """
import argparse, json, sys
from ft.adapters.megatron_lm.start import load
load(sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser()
add_megatron_arguments(parser)
print(json.dumps([each for each in parser._option_string_actions if each.startswith("--")]))
"""


@pytest.mark.parametrize("release", ["0.16", NEWEST])
def test_every_flag_of_a_checkouts_parser_is_found_in_its_sources(release):
    script = checkouts.tree(release) / "pretrain_gpt.py"
    asking = [sys.executable, "-c", PARSER, script]
    shown = subprocess.run(asking, cwd=checkouts.ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    known = own_flags(script.parent, script)
    assert set(json.loads(shown.splitlines()[-1])) - known == set()
    assert not {"--standby", "--nnodes", "--run-dir", "--inject", "--num-moe-experts"} & known


@pytest.mark.newest
def test_the_flags_that_only_the_reference_trainer_has_are_known():
    root = tree.root_of(str(checkouts.installed()))
    common = own_flags(root, tree.SCRIPT) | {tree.METRICS, tree.REFERENCE}
    ours = {flag for flag in all_flags() if not flag.startswith("--ft-")}
    assert ours - common == set(tree.OF_REFERENCE)


@LONG
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if "checkout" in run])
def test_faults_change_nothing_in_a_checkout(name, tmp_path, corpus):
    script, planned = checkouts.tree("0.16") / "pretrain_gpt.py", RUNS[name]["checkout"]
    steps = {fault.partition(":")[0].partition("=")[2] for fault in planned}
    flags = flags_of(name, corpus, tmp_path)
    equal(script, flags, tmp_path, faults(*planned, standby=2), recoveries=len(steps))
    if "--save-interval 5" in flags:
        written = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
        assert written == ["iter_0000005", "iter_0000010", "iter_0000012"]


@pytest.mark.parametrize(
    ("release", "form"),
    [
        pytest.param("0.16", "--dist-ckpt-optim-fully-reshardable", marks=LONG),
        pytest.param("installed", "", marks=pytest.mark.newest),
        pytest.param("installed", "--dist-ckpt-optim-fully-reshardable", marks=LONG),
    ],
)
def test_a_run_that_lost_all_copies_goes_on_as_torchrun_does_from_the_checkpoint(tmp_path, release, form):
    """The state of torch's Adam is in the checkpoint of a distributed optimizer."""
    script = checkouts.script_of(release)
    flags = f"{TWO_STAGES} {form} --save {{save}} --save-interval 4"
    whole, _ = checkouts.plain(script, flags.format(save=tmp_path / "kept"), tmp_path / "whole")
    resuming = f"{flags.format(save=tmp_path / 'again')} --load {tmp_path / 'kept'} --ckpt-step 4"
    resumed, _ = checkouts.plain(script, resuming, tmp_path / "resumed")
    # Rank 3, in step 6 too when rank 2 has its gradients, dies while it leaves that step with rank 2's other copy.
    planned = faults("kill@step=6:rank=2:phase=optimizer", "kill@step=6:rank=3:phase=leave", standby=2)
    done = checkouts.protected(script, flags.format(save=tmp_path / "save"), tmp_path / "run", planned)
    assert done.returncode == 0 and "warm restart 1" in done.stdout, done.stdout[-5000:]
    before = {step: values for step, values in of_steps(whole).items() if step <= 4}
    assert of_run(tmp_path / "run") == before | of_steps(resumed) == of_steps(whole)


@LONG
@pytest.mark.parametrize("release", ["0.16", "installed"])
def test_a_flipped_bit_is_found_and_the_step_is_taken_again(tmp_path, release):
    script = checkouts.script_of(release)
    flags, planned = f"{TWO_STAGES} --rerun-mode disabled", "bit-flip@step=3:rank=1:operator=mm:phase=forward"
    shown = equal(script, flags, tmp_path, faults(planned), recoveries=0, protections="--ft-dmr piggyback")
    assert "DMR: step 3: attempt 1 of 3 went wrong" in shown


@LONG
def test_a_plan_of_double_execution_is_made_and_followed(tmp_path):
    script, prof, plan = checkouts.tree("0.16") / "pretrain_gpt.py", tmp_path / "prof.json", tmp_path / "plan.json"
    flags = f"{TWO_STAGES} --rerun-mode disabled"
    measured = f"{flags} --save {tmp_path / 'none'} --save-interval 4"
    run = f"run --nproc-per-node 4 --run-dir {tmp_path / 'profile'} {script} {measured}"
    checkouts.ft(f"dmr profile --out {prof} -- {sys.executable} -m ft {run}")
    assert not (tmp_path / "none").exists() and not (tmp_path / "profile" / "metrics.jsonl").exists()
    checkouts.ft(f"dmr plan {prof} --memory-budget 8GB --out {plan}")
    planned = faults("bit-flip@step=3:rank=1:operator=mm:phase=forward")
    # a plan fits a run of the flags that were measured, wherever it saves
    saving = flags + " --save {save} --save-interval 4"
    shown = equal(script, saving, tmp_path, planned, recoveries=0, protections=f"--ft-dmr-plan {plan}")
    assert "DMR: step 3: attempt 1 of 3 went wrong" in shown


def test_bad_input_is_refused_at_once(tmp_path):
    script = checkouts.tree("0.16") / "pretrain_gpt.py"
    done = ft("run", "--nproc-per-node", 2, "--run-dir", tmp_path / "run", script, "--ft-hot-swp", "--skip-train")
    assert done.returncode == 2 and "did you mean --ft-hot-swap?" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("release", "more"),
    [("0.16", ""), ("0.19", " --use-mup --mup-base-hidden-size 16")],
)
def test_this_projects_trainer_computes_what_the_checkout_does(tmp_path, corpus, release, more, ranks):
    """With dropout. The checkout logs the gradient norm in fp32; its NullTokenizer of 0.16 has one id more."""
    script = checkouts.tree(release) / "pretrain_gpt.py"
    flags = FLAGS["dropout-and-bf16"] + more
    theirs = flags.format(data=corpus, cache=tmp_path / "theirs")
    if release == "0.16":
        theirs = theirs.replace("--vocab-size 128", "--vocab-size 127")
    plain, _ = checkouts.plain(script, theirs, tmp_path / "plain")
    ours = f"{flags.format(data=corpus, cache=tmp_path / 'ours')} --metrics-file {tmp_path}/ours.jsonl"
    assert ranks(small_runs.launch, 4, ours, init=False, timeout=240) == [0] * 4
    lines = small_runs.metrics(tmp_path / "ours.jsonl")
    found = {line["step"]: (line["loss"].hex(), float(numpy.float32(line["grad_norm"])).hex()) for line in lines}
    assert found == of_steps(plain)
