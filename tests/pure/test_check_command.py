"""ft check on checkouts, and that each flag has a help text of its own; single answers: ``conversations/check``."""

import dataclasses
import json
from pathlib import Path

import pytest
from megatron_lm_trees import trees

from ft import cli
from ft.base.checkout import CHECKOUT
from ft.base.options import field_docs, spellings
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import Options

TRAINER = str(CHECKOUT / "pretrain_gpt.py")
LINE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 32 --train-iters 10 --lr 1e-3 --mock-data --bf16 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer "
)


@pytest.mark.parametrize("script", [TRAINER, *(str(tree / "pretrain_gpt.py") for tree in trees())])
def test_flags_of_ft_run_after_the_script_are_named_with_their_place_once(capsys, script):
    line = f"{LINE} --transformer-impl local --ft-hot-swap --standby 1 --run-dir=runs/a --ft-hsdp-replicas 2"
    assert cli.main(["check", "--json", script, *line.split()]) == 2
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert [entry["flag"] for entry in refused] == ["--standby", "--run-dir", "--ft-hsdp-replicas"]
    assert all("before the script" in entry["fix"] for entry in refused)


CHECKOUTS = "--gpus", "4", "--json"


@pytest.mark.parametrize("root", trees(), ids=lambda root: root.name)
def test_a_checkout_has_its_own_protections_and_all_its_seams(root, capsys):
    line = (LINE + "--transformer-impl local --ft-hot-swap").replace("--tensor-model-parallel-size 2 ", "").split()
    assert cli.main(["check", *CHECKOUTS, str(root / "pretrain_gpt.py"), *line]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {each["status"] for each in said["hooks"]} == {"fits"} and said["layout"]["pp"] == 4
    fits = {each["name"]: each["fits"] for each in said["protections"]}
    assert fits["hot-swap"] and fits["stage rebuild"] and not fits["replicas"] and not fits["double execution"]
    assert cli.main(["check", *CHECKOUTS, str(root / "pretrain_gpt.py"), *line, "--rerun-mode", "disabled"]) == 0
    fits = {each["name"]: each["fits"] for each in json.loads(capsys.readouterr().out)["protections"]}
    assert fits["replicas"] and fits["stacked shards"] and fits["double execution"] and fits["swapped ends"]


@pytest.mark.parametrize("root", trees(), ids=lambda root: root.name)
def test_all_problems_of_a_checkouts_line_are_named_at_once(root, capsys):
    line = (LINE + "--transformer-impl local --use-megatron-fsdp --ft-hot-swap").split()
    assert cli.main(["check", "--gpus", "7", "--json", str(root / "pretrain_gpt.py"), *line]) == 2
    reasons = " | ".join(entry["reason"] for entry in json.loads(capsys.readouterr().out)["refused"])
    assert "--use-megatron-fsdp cannot be protected" in reasons and "7 ranks" in reasons


@pytest.mark.parametrize("root", trees(), ids=lambda root: root.name)
def test_scripts_of_mamba_models_need_what_core_builds_them_with(root, capsys):
    for script in filter(Path.exists, (root / f"pretrain_{kind}.py" for kind in ("mamba", "hybrid"))):
        line = [str(script), *LINE.split(), "--transformer-impl", "local"]
        assert cli.main(["check", "--gpus", "8", "--json", *line]) == 0
        assert json.loads(capsys.readouterr().out)["needs"] == ["GPU", "transformer-engine", "mamba-ssm"]


@pytest.mark.parametrize("root", trees(), ids=lambda root: root.name)
def test_flags_that_a_checkout_makes_from_dataclasses_are_its_own(root, capsys):
    line = [str(root / "pretrain_gpt.py"), *LINE.split(), "--transformer-impl", "local", "--ft-hot-swap"]
    assert cli.main(["check", "--gpus", "8", "--json", *line, "--seed", "7"]) == 0
    capsys.readouterr()
    assert cli.main(["check", "--gpus", "8", "--json", *line, "--standby", "1"]) == 2


# --- flags ------------------------------------------------------------------------------------------------------------


def test_every_field_has_a_help_text_and_a_flag_of_its_own():
    seen = {}
    for concern in dataclasses.fields(Options):
        docs = field_docs(concern.default_factory)
        for f in dataclasses.fields(concern.default_factory):
            assert docs.get(f.name) or concern.name == "core", f"{concern.name}.{f.name} has no docstring"
            for spelling in [s for group in spellings(f) for s in group]:
                assert spelling not in seen, f"{spelling} is both {seen[spelling]} and {f.name}"
                seen[spelling] = f.name
    assert "--num-layers" in arguments.help_text()
