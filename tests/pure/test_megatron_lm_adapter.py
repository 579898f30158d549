"""The adapter of Megatron-LM checkouts, as far as it starts nothing: hooks, the split, flags and refusals."""

import json
from types import SimpleNamespace

import pytest
import torch
from megatron_lm_trees import trees

from ft.adapters.megatron_lm import hooks, refusals, state, tree
from ft.adapters.megatron_lm.hooks import split
from ft.adapters.megatron_lm.start import resuming
from ft.adapters.megatron_lm.step import loss_name
from ft.base.errors import UserError
from ft.commands import checkouts, protection
from ft.job.agent.options import Script
from ft.protection import table

TRAINER = """
def pretrain(train_valid_test_dataset_provider, forward_step_func):
    initialize_megatron()
    setup_model_and_optimizer()
    build_train_valid_test_data_iterators()
    if True:
        train()

def setup_model_and_optimizer(checkpointing_context=None):
    load_checkpoint()

def get_train_valid_test_num_samples(): pass

def build_train_valid_test_datasets(provider): pass

def build_train_valid_test_data_loaders(provider): pass

def build_train_valid_test_data_iterators(provider):
    return build_train_valid_test_data_loaders(RerunDataIterator(provider))

def train(train_data_iterator, config):
    iteration = args.iteration
    num_floating_point_operations_so_far = args.num_floating_point_operations_so_far
    config.finalize_model_grads_func = finalize_model_grads
    train_step(), training_log(), checkpoint_and_decide_exit()

def train_step(optimizer, data_iterator, forward_backward_func):
    forward_backward_func(), optimizer.step()

def preprocess_common_state_dict(state): pass

def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
                 grad_norm, params_norm, num_zeros_in_grad, is_first_iteration): pass

def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far):
    save_checkpoint_and_time()

def evaluate_and_print_results(): pass

def evaluate(model): pass

from megatron.core.pipeline_parallel import get_forward_backward_func
from .datasets.data_samplers import build_pretraining_data_loader
from .checkpointing import save_checkpoint
from .async_utils import maybe_finalize_async_save
"""
CHECKPOINTING = """
def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                    checkpointing_context=None, preprocess_common_state_dict_fn=None): pass

def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, checkpointing_context=None):
    check_checkpoint_args(1)

def check_checkpoint_args(checkpoint_args): pass

def checkpoint_exists(path): pass
"""
FILES = {
    "pretrain_gpt.py": "",
    "megatron/training/training.py": TRAINER,
    "megatron/training/checkpointing.py": CHECKPOINTING,
    "megatron/training/initialize.py": "def initialize_megatron(allow_no_cuda=False): pass\n"
    "def _initialize_distributed(): torch.distributed.is_initialized()\ndef _compile_dependencies(): pass\n",
    "megatron/training/global_vars.py": "def _set_tensorboard_writer(args): pass\ndef _set_wandb_writer(args): pass\n"
    "def _set_one_logger(args): pass\n",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 2\n",
}


@pytest.fixture
def checkout(tmp_path):
    """A folder with the functions of a checkout that the adapter relies on, and nothing else."""
    for name, text in FILES.items():
        file = tmp_path / "Megatron-LM" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "Megatron-LM"


def script(checkout, *flags):
    return Script(str(checkout / "pretrain_gpt.py"), False, list(flags))


def test_every_hook_is_in_every_checkout_that_is_here():
    if not trees():
        pytest.skip("no checkout of Megatron-LM: name their folder in MEGATRON_LM_TREES")
    for root in trees():
        assert list(hooks.problems(tree.read(root))) == []


def test_a_checkout_is_known_by_the_trainer_beside_the_script(checkout, tmp_path):
    assert tree.root_of(str(checkout / "pretrain_gpt.py")) == checkout
    assert tree.root_of(str(tmp_path / "train.py")) is None
    assert tree.read(checkout).version == "0.18.2"


def test_a_checkout_with_all_hooks_fits(checkout):
    assert all(finding.status == hooks.FITS for finding in hooks.check_tree(checkout))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def train_step", "def step", "train_step is missing"),
        ("grad_norm, params", "params", "training_log has no parameter grad_norm"),
        ("iteration = args.iteration", "iteration = 0", "train does not set 'iteration = args.iteration'"),
        ("    save_checkpoint_and_time()", "    pass", "does not call save_checkpoint_and_time"),
        ("    if True:\n        train()", "    train()\n    train()", "does not call train in one statement"),
    ],
)
def test_what_differs_in_a_checkout_is_named(checkout, old, new, says):
    file = checkout / "megatron/training/training.py"
    assert old in TRAINER
    file.write_text(TRAINER.replace(old, new))
    (problem,) = hooks.problems(tree.read(checkout))
    assert says in problem[0] and str(file) in problem[0]


def test_a_release_that_is_not_known_is_tried_with_a_sentence(checkout):
    assert hooks.notice(tree.read(checkout)) is None
    (checkout / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    found = tree.read(checkout)
    assert list(hooks.problems(found)) == []
    assert hooks.notice(found).startswith("Megatron-LM 0.20.0 is not among the releases that were protected before")


def test_a_checkout_without_core_is_refused(checkout):
    (checkout / "megatron/core/package_info.py").unlink()
    with pytest.raises(UserError, match="no megatron-core beside it"):
        tree.read(checkout)


def test_a_second_megatron_on_the_path_is_found(checkout, tmp_path):
    other = tmp_path / "other"
    (other / "megatron").mkdir(parents=True)
    (other / "megatron" / "__init__.py").touch()
    assert tree.others_on_path(checkout, [str(other), str(checkout), str(tmp_path)]) == [other]


def test_without_our_flags_a_checkout_is_a_script_like_any_other(checkout):
    assert not checkouts.is_protected_checkout(script(checkout, "--train-iters", "3"))
    assert checkouts.is_protected_checkout(script(checkout, "--train-iters", "3", "--ft-hot-swap"))


def test_our_flags_are_taken_out_and_given_to_the_adapter(checkout):
    given = script(checkout, "--ft-snapshot-peers", "2", "--lr", "1", "--ft-hot-swap")
    adapted = checkouts.adapted(given)
    options, path, *flags = adapted.args
    assert adapted.is_module and path == given.target and flags == ["--lr", "1"]
    assert json.loads(options)["ft_hot_swap"] is True and json.loads(options)["ft_snapshot_peers"] == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ft-hot-swp"], "unknown flag --ft-hot-swp"),
        (["--ft-snapshot-peers", "2"], "ask for no protection"),
        (["--ft-hot-swap", "--ft-checkfree-plus"], "the first two and the last two of 1 pipeline stage(s)"),
        (["--ft-hot-swap", "--perform-rl-step"], "--perform-rl-step cannot be protected"),
        (["--optimizer=muon", "--ft-hot-swap"], "--optimizer muon cannot be protected"),
        (["--ft-hot-swap", "--ft-snapshot-peers", "9"], "--ft-snapshot-peers 9"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(checkout, flags, says):
    _, problems = checkouts.examine(script(checkout, *flags), 4, 0)
    assert [problem for problem, fix in problems if says in problem and fix]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "--rerun-mode validate_results repeats a step on one replica"),
        ("--rerun-mode disabled --global-batch-size 6", "global batch 6 is not a multiple of 2 replicas"),
        ("--rerun-mode disabled --rampup-batch-size 4 4 24", "--rampup-batch-size does not go with replicas"),
        ("--rerun-mode disabled --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias does not go with"),
        (
            "--rerun-mode disabled --moe-router-load-balancing-type aux_loss global_aux_loss",
            "global_aux_loss does not go",
        ),
        (
            "--rerun-mode disabled --ddp-param-name-patterns-for-fp32-local-accumulation *.router.weight",
            "fp32-local-accumulation does not go with replicas",
        ),
    ],
)
def test_what_replicas_of_a_checkout_cannot_train_with_is_refused(checkout, flags, says):
    given = script(checkout, "--global-batch-size", "8", *flags.split())
    _, problems = checkouts.examine(given, 4, 2)
    assert [problem for problem, fix in problems if says in problem and fix]


def test_replicas_of_a_checkout_need_no_flag_of_the_trainer(checkout):
    _, problems = checkouts.examine(script(checkout, "--global-batch-size", "8", "--rerun-mode", "disabled"), 4, 2)
    assert problems == []


def test_what_can_be_protected_is_not_refused(checkout):
    options, problems = checkouts.examine(script(checkout, "--optimizer", "adam", "--ft-hot-swap"), 4, 0)
    assert problems == [] and options.fault_tolerance.ft_hot_swap


def test_a_script_of_a_checkout_outside_of_it_is_refused(tmp_path):
    file = tmp_path / "pretrain_gpt.py"
    file.write_text("from megatron.training import get_args, pretrain\n")
    stray = Script(str(file), False, ["--ft-hot-swap"])
    assert not checkouts.is_protected_checkout(stray)
    ((problem, _),) = checkouts.outside_checkout(stray)
    assert "no megatron/training/training.py beside it" in problem
    assert checkouts.outside_checkout(Script(str(file), False, ["--lr", "1"])) == []


def test_modes_are_refused_by_the_arguments_that_the_trainer_has_parsed():
    arguments = SimpleNamespace(skip_train=True, optimizer="adam", cuda_graph_impl="local", dataloader_type="single")
    arguments.rerun_mode = "validate_results"
    found = [problem.split()[0] for problem, _ in refusals.of_arguments(arguments, table.TABLE[:1])]
    assert found == ["--skip-train", "--cuda-graph-impl"]
    (repeated,) = refusals.of_arguments(SimpleNamespace(rerun_mode="validate_results"), (), intercepts_operators=True)
    assert "--rerun-mode validate_results" in repeated[0]


def test_the_rest_of_a_function_can_be_called_again(tmp_path):
    file = tmp_path / "made.py"
    file.write_text(
        "total = 0\n"
        "def whole(items, start=1):\n"
        "    global total\n"
        "    count = start\n"
        "    items.append('head')\n"
        "    if items:\n"
        "        work(items)\n"
        "    count += 1\n"
        "    total = total + count\n"
        "    later = [each for each in items]\n"
    )
    made: dict = {"work": lambda items: items.append("work")}
    exec(compile(file.read_text(), str(file), "exec"), made)
    begun: list[dict] = []
    split(made["whole"], "work", begun.append, lambda rest: [rest(), rest()])
    items: list[str] = []
    made["whole"](items)
    assert items == ["head", "work", "work"] and begun == [{"items": items, "start": 1}]
    assert made["total"] == 2 + 3  # the variable of the enclosing function goes on from call to call


def test_sums_keep_every_bit():
    values = {"advanced iterations": 3, "lm loss": torch.tensor([0.1], dtype=torch.float32), "z": torch.tensor(1e-3)}
    back = state.decode(json.loads(json.dumps(state.encode(values))), torch.device("cpu"))
    assert list(back) == list(values) and back["advanced iterations"] == 3
    for name in ("lm loss", "z"):
        assert torch.equal(back[name], values[name]) and back[name].shape == values[name].shape


def test_a_warm_restart_loads_the_newest_checkpoint_of_the_run():
    flags = ["--load", "old", "--save=new", "--finetune", "--ckpt-step", "3", "--lr", "1"]
    assert resuming(flags, lambda folder: folder == "new") == ["--save=new", "--lr", "1", "--load", "new"]
    assert resuming(flags, lambda folder: False) == flags
    assert resuming(["--lr", "1"], lambda folder: True) == ["--lr", "1"]


LOSS = torch.tensor([3.5, 7.0])


@pytest.mark.parametrize(
    ("reports", "shown"),
    [
        ([{}], "nothing"),
        ([{"lm loss": LOSS, "z loss": LOSS[:1]}], r"lm loss \(2 numbers\), z loss \(1 numbers\)"),
        ([{"lm loss": LOSS[0]}], r"lm loss \(1 numbers\)"),
        ([{"lm loss": 3.5}], r"lm loss \(a float\)"),
        ([{"lm loss": (LOSS[0], LOSS[1])}], r"lm loss \(a tuple\)"),
        ([LOSS], r"a value that is no dict \(2 numbers\)"),
        ([{"lm loss": LOSS}, {"other": LOSS}], r"lm loss \(2 numbers\); other \(2 numbers\)"),
        ([{"lm loss": LOSS}, {}], r"lm loss \(2 numbers\); nothing"),
    ],
)
def test_replicas_refuse_losses_that_they_cannot_add_up(reports, shown):
    with pytest.raises(UserError, match=f"reports {shown}; replicas add up one loss"):
        loss_name(reports)


def test_replicas_take_one_loss_under_any_name():
    assert loss_name([{"ce loss": LOSS}, {"ce loss": LOSS}]) == "ce loss"


# ------------------------------------------------------------------------------------------ the choice of a trainer


@pytest.mark.parametrize("release", [None, (0, 16, 1), (0, 18, 1), (0, 19, 2)])
def test_the_reference_trainer_runs_where_nvidias_is_not_or_if_it_is_asked_for(release):
    asked = ["--lr", "1", "--reference-trainer"]
    assert tree.choose(asked, release) == (False, asked)  # the reference trainer knows its flag
    assert tree.choose(["--lr", "1"], release)[0] == (release == (0, 19, 2))


def test_flags_that_only_the_reference_trainer_has_are_refused_with_the_way_to_run_it():
    with pytest.raises(UserError, match="flag of the reference trainer") as refused:
        tree.choose(["--keep-last=3", "--lr", "1", "--no-exit-signal-handler"], (0, 19, 2))
    assert [problem.split()[0] for problem, _ in refused.value.problems] == ["--keep-last", "--no-exit-signal-handler"]
    assert all("add --reference-trainer" in fix for _, fix in refused.value.problems)
    assert tree.choose(["--keep-last", "3"], None) == (False, ["--keep-last", "3"])


def test_nvidias_trainer_runs_where_it_is():
    assert tree.choose(["--nvidia-trainer", "--lr", "1"], (0, 19, 2)) == (True, ["--lr", "1"])
    for release, found in ((None, "carries no trainer"), ((0, 18, 1), "0.18.1 takes its model in another way")):
        with pytest.raises(UserError, match=found):
            tree.choose(["--nvidia-trainer"], release)
    with pytest.raises(UserError, match="contradict each other"):
        tree.choose(["--nvidia-trainer", "--reference-trainer"], (0, 19, 2))


def test_the_script_of_the_installed_trainer_belongs_to_the_folder_it_is_installed_in(monkeypatch, tmp_path):
    monkeypatch.setattr(tree, "installed", lambda: tmp_path)
    assert tree.root_of(str(tree.SCRIPT)) == tmp_path
    given = SimpleNamespace(script=str(protection.TRAINER), script_args=["--lr", "1"], module=False)
    monkeypatch.setattr(tree, "installed_release", lambda: (0, 19, 2))
    protection.choose_trainer(given)
    assert (given.script, given.script_args) == (str(tree.SCRIPT), ["--lr", "1"])
    other = SimpleNamespace(script="examples/own_trainer.py", script_args=["--nvidia-trainer"], module=False)
    protection.choose_trainer(other)
    assert other.script_args == ["--nvidia-trainer"]


def test_the_script_of_the_installed_trainer_is_adapted_without_flags_and_has_a_metrics_file(monkeypatch, checkout):
    monkeypatch.setattr(tree, "installed", lambda: checkout)

    def script(*flags: str) -> Script:
        return Script(str(tree.SCRIPT), False, list(flags))

    assert checkouts.is_protected_checkout(script("--lr", "1"))
    assert not checkouts.is_protected_checkout(script("--lr", "1", "--profile"))  # a mode that cannot be protected
    options, target, *flags = checkouts.adapted(script("--metrics-file", "m.jsonl", "--lr", "1")).args
    assert (json.loads(options)["metrics_file"], target, flags) == ("m.jsonl", str(tree.SCRIPT), ["--lr", "1"])
    view, found = checkouts.examine_flags(script("--lr", "1"), 2, 0)
    assert view is not None and found == []
    _, found = checkouts.examine_flags(script("--lr", "1", "--metrics-file=m.jsonl"), 2, 2)
    assert checkouts.LOSES_LINES in found


@pytest.mark.parametrize(("own", "replicas"), [(["--ft-dmr", "naive"], 0), ([], 2)])
def test_the_script_of_the_installed_trainer_repeats_no_steps_by_itself_where_a_protection_does(
    monkeypatch, checkout, own, replicas
):
    monkeypatch.setattr(tree, "installed", lambda: checkout)
    script = Script(str(tree.SCRIPT), False, ["--lr", "1", *own])
    assert checkouts.adapted(script, replicas).args[-2:] == ["--rerun-mode", "disabled"]
    assert not [problem for problem, _ in checkouts.examine_flags(script, 4, replicas)[1] if "--rerun-mode" in problem]
    given = Script(str(tree.SCRIPT), False, ["--rerun-mode", "report_stats", *own])
    assert any("--rerun-mode" in problem for problem, _ in checkouts.examine_flags(given, 4, replicas)[1])
