"""The adapter of Megatron-LM checkouts, as far as it starts nothing: hooks, the split, flags and refusals."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron_lm_trees import trees
from planted_checkout import plant

from ft.adapters.megatron_lm import hooks, refusals, state, trainer, tree
from ft.adapters.megatron_lm.hooks import split
from ft.adapters.megatron_lm.iterators import Iterators
from ft.commands import checkouts, protection
from ft.job.agent.options import Script
from ft.protection import table
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.patches import step_state


@pytest.fixture
def checkout(tmp_path):
    return plant(tmp_path / "Megatron-LM")


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
    assert tree.read(checkout).version == "0.19.2"


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


def test_what_a_redone_step_would_count_twice_is_put_back(monkeypatch):
    training = SimpleNamespace(_seqlen_stats_in_iteration=torch.tensor([20.0, 200.0]), _seqlen_stats_active=True)
    monkeypatch.setattr(tree, "module", lambda name: training)
    tracker = {name: torch.tensor([3.0]) for name in ("loss_values", "values", *trainer._PREDICTIONS)}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    run = SimpleNamespace(device=torch.device("cpu"), counts=json.loads(json.dumps(trainer.counts())))
    training._seqlen_stats_in_iteration += 7
    for total in tracker.values():
        total += 1
    step_state.clear_losses()
    trainer._reset_counts(run)
    assert training._seqlen_stats_active and training._seqlen_stats_in_iteration.tolist() == [20.0, 200.0]
    assert {name: total.item() for name, total in tracker.items()} == dict(zip(tracker, (0, 0, 3, 3), strict=True))
    run.counts = {}
    trainer._reset_counts(run)
    assert not training._seqlen_stats_active and list(tracker) == ["loss_values", "values"]


def test_hooks_that_record_a_step_are_removed_when_it_is_abandoned(monkeypatch):
    layer, module = torch.nn.Linear(1, 1), ModuleType("megatron.training.dgrad_logging")
    module._LOGGER = SimpleNamespace(remove_hooks=layer.register_forward_hook(lambda *_: None).remove)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trainer._reset_loggers()
    assert module._LOGGER is None and not layer._forward_hooks


def test_iterators_are_moved_to_the_end_of_a_dataset_but_not_made_there():
    names = ("data_iterators", "data_loaders", "datasets")
    training = SimpleNamespace(**{f"build_train_valid_test_{name}": lambda provider: (None,) for name in names})
    training.build_pretraining_data_loader = lambda dataset, consumed: consumed
    iterators = Iterators(training)
    assert iterators.loader(range(8), 8) == 8  # the checkout says what it thinks of it
    iterators.make(None)
    assert iterators.loader(range(8), 8) is None and iterators.loader(range(8), 4) == 4


# ------------------------------------------------------------------------------------------ the choice of a trainer


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
