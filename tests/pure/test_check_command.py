"""ft check: what it says about a launch line, as text and as JSON; and that each flag has a help text of its own."""

import dataclasses
import json
from pathlib import Path

import pytest
from megatron_lm_trees import trees

from ft import cli
from ft.base.checkout import CHECKOUT
from ft.base.options import field_docs, spellings
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import Options, needs

TRAINER = str(CHECKOUT / "pretrain_gpt.py")
LINE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 32 --train-iters 10 --lr 1e-3 --mock-data --bf16 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer "
)


def asked(capsys, flags: str, *before: str) -> tuple[int, dict]:
    code = cli.main(["check", *before, "--json", TRAINER, *(LINE + flags).split()])
    return code, json.loads(capsys.readouterr().out)


def test_without_gpus_the_smallest_world_is_assumed(capsys):
    code, said = asked(capsys, "")
    assert code == 0 and said["accepted"] and said["refused"] == []
    assert (said["layout"]["world_size"], said["layout"]["dp"]) == (8, 1)
    assert said["batch"]["microbatches"] == 16


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(needs, "may_have_gpu", lambda: False)


@pytest.mark.parametrize("before", [("--gpus", "8"), ("--nnodes", "1", "--nproc-per-node", "8")])
def test_a_line_for_another_machine_is_accepted_with_what_it_needs(capsys, without_gpu, before):
    code, said = asked(capsys, "--transformer-impl transformer_engine --fp8-format hybrid", *before)
    assert code == 0 and said["accepted"] and said["missing"] == []
    assert said["needs"] == ["GPU", "transformer-engine"]


def test_a_line_that_needs_what_is_not_here_is_not_accepted_here(capsys, without_gpu):
    code, said = asked(capsys, "--transformer-impl transformer_engine --fp8-format hybrid")
    assert code == 1 and not said["accepted"] and said["refused"] == []
    assert said["missing"] == ["GPU", "transformer-engine"]


@pytest.mark.parametrize(
    ("before", "flags", "verdict"),
    [
        ((), "", "accepted"),
        (
            (),
            "--multi-latent-attention",
            "not here: needs GPU, transformer-engine; --gpus N asks about a run on N GPUs",
        ),
        (("--gpus", "8"), "--multi-latent-attention", "accepted on machines that have: GPU, transformer-engine"),
        ((), "--multi-latent-attention --hiden-size 3", "refused: "),
    ],
)
def test_the_first_line_of_the_text_is_the_verdict(capsys, without_gpu, before, flags, verdict):
    cli.main(["check", *before, TRAINER, *(LINE + flags).split()])
    assert capsys.readouterr().out.splitlines()[0].startswith(verdict)


def test_all_problems_are_named_at_once_with_flag_reason_and_fix(capsys):
    code, said = asked(capsys, "--hiden-size 3 --perform-rl-step --num-attention-heads 7 --global-batch-size 3")
    assert code == 2 and not said["accepted"]
    flags = {entry["flag"] for entry in said["refused"]}
    assert {"--hiden-size", "--perform-rl-step"} <= flags and len(said["refused"]) >= 2
    assert all(entry["reason"] and entry["fix"] for entry in said["refused"])


@pytest.mark.parametrize("script", [TRAINER, *(str(tree / "pretrain_gpt.py") for tree in trees())])
def test_flags_of_ft_run_after_the_script_are_named_with_their_place_once(capsys, script):
    line = f"{LINE} --transformer-impl local --ft-hot-swap --standby 1 --run-dir=runs/a --ft-hsdp-replicas 2"
    assert cli.main(["check", "--json", script, *line.split()]) == 2
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert [entry["flag"] for entry in refused] == ["--standby", "--run-dir", "--ft-hsdp-replicas"]
    assert all("before the script" in entry["fix"] for entry in refused)


def test_memory_falls_with_the_ranks_and_grows_with_snapshots(capsys):
    _, small = asked(capsys, "", "--gpus", "8")
    _, large = asked(capsys, "", "--nnodes", "4", "--nproc-per-node", "8")
    assert large["layout"]["dp"] == 4
    assert large["memory"]["gpu"]["optimizer"] * 4 == pytest.approx(small["memory"]["gpu"]["optimizer"])
    assert large["memory"]["gpu"]["weights"] == small["memory"]["gpu"]["weights"]
    assert large["memory"]["host"]["snapshots_of_hot_swap"] > large["memory"]["host"]["without_protection"]


def test_each_protection_says_whether_it_fits_and_what_it_lacks(capsys):
    _, said = asked(capsys, "--transformer-impl transformer_engine --delay-wgrad-compute")
    found = {each["name"]: each for each in said["protections"]}
    assert found["hot-swap"]["fits"] and found["stage rebuild"]["fits"]
    assert not found["double execution"]["fits"]
    assert "--delay-wgrad-compute" in found["double execution"]["needs"][0]["reason"]


def test_text_has_the_same_answer(capsys):
    assert cli.main(["check", TRAINER, *LINE.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("accepted") and "8 GPU(s)" in out and "hot-swap (--ft-hot-swap): fits" in out


def test_a_checkouts_own_flags_are_not_refused(capsys, tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text("# another trainer\n")
    training = tmp_path / "megatron/training"
    training.mkdir(parents=True)
    (training / "training.py").write_text("")
    (training / "arguments.py").write_text("group.add_argument('--yaml-cfg', type=str)\n")
    words = ["check", "--gpus", "8", "--json", str(tmp_path / "pretrain_gpt.py"), *(LINE + "--yaml-cfg a.yaml").split()]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["program"] == "checkout"


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


def test_a_script_below_a_checkout_is_refused_with_the_reason(tmp_path, capsys):
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/training.py").touch()
    (tmp_path / "examples/t5").mkdir(parents=True)
    script = tmp_path / "examples/t5/pretrain_t5.py"
    script.write_text("from megatron.training import get_args, pretrain\n")
    for command in (["check", str(script)], ["run", str(script), "--ft-hot-swap"]):
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert f"lies in a subfolder of the Megatron-LM checkout {tmp_path}" in said
        assert f"such as {tmp_path / 'pretrain_gpt.py'}" in said


@pytest.mark.parametrize("name", ["missing.py", "other.py"])
def test_another_script_is_refused(name, tmp_path, capsys):
    (tmp_path / "other.py").write_text("print(1)\n")
    assert cli.main(["check", str(tmp_path / name), "--num-layers", "2"]) == 2
    assert "fix:" in capsys.readouterr().err


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
