"""The table of protections: what it says is what the code does, and what the page says."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft.adapters.megatron_lm import refusals
from ft.base.checkout import CHECKOUT
from ft.commands import checkouts
from ft.commands.check import answer_for
from ft.job.agent.options import Script
from ft.protection import table
from ft.protection.contract import Layer, Protection
from ft.protection.stack import Stack
from megatron.ft_trainer import arguments

PAGE = Path(__file__).parent.parent.parent / "docs" / "protections.md"


def test_the_page_is_what_the_command_prints():
    assert PAGE.read_text().endswith(table.text())


@pytest.mark.parametrize("entry", table.TABLE, ids=lambda entry: entry.name)
def test_every_entry_is_a_protection_with_flags_or_variables_that_ask_for_it(entry):
    assert issubclass(entry.load(), Protection)
    assert entry.flags or entry.variables
    assert set(entry.needs) <= {each.name for each in table.TABLE}
    assert not entry.is_asked(SimpleNamespace(), {})
    for flag in entry.flags:
        assert entry.is_asked(SimpleNamespace(**{flag: True}), {})
    for name in entry.variables:
        assert entry.is_asked(SimpleNamespace(), {name: "0"})


def test_conflicts_name_protections_of_the_table_once():
    names = [entry.name for entry in table.TABLE]
    pairs = [frozenset((each.one, each.other)) for each in table.CONFLICTS]
    assert len(pairs) == len(set(pairs)) and set().union(*pairs) <= set(names)
    assert all(len(pair) == 2 for pair in pairs) and set(pairs) <= {frozenset(p) for p in combinations(names, 2)}


def test_a_layer_needs_the_ones_that_it_is_part_of_outside_of_itself():
    order = [entry.name for entry in table.TABLE]
    for entry in table.TABLE:
        assert all(order.index(needed) < order.index(entry.name) for needed in entry.needs)


LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 2 "
    "--global-batch-size 4 --lr 1e-3 --mock-data"
)
ASKING = {
    table.HOT_SWAP: "--ft-hot-swap",
    table.REPLICAS: "",  # by a flag of ft run
    table.DOUBLE: "--ft-dmr piggyback",
    table.PROFILE: "--ft-dmr-profile p.json",
    table.STAGES: "--ft-hot-swap --ft-checkfree",
}
VALUES = {"--fp8-format": "hybrid", "--cuda-graph-impl": "local", "--dsa-kernel-backend": "cudnn", "--num-experts": "4"}
VALUES |= dict.fromkeys(("--cpu-offloading-num-layers", *table._WEIGHT_SHARDS), "2")
VALUES |= dict.fromkeys(("--logits-load-dir", "--logits-save-dir", "--moe-routing-trace-path"), "folder")
VALUES |= {"--moe-router-force-biased": "-1.0", "--fault-injector-ranks": "0", "--fault-injector-num-ranks": "1"}
MODES = [(mode, flag) for mode in table.MODES for flag in mode.flags]


def shown(each) -> str:
    return each if isinstance(each, str) else each.protections[0]


def turned_on(mode, flag) -> str:
    """Return flags that turn on a mode."""
    beside = [(name, values) for name, values in mode.beside.items() if "" not in values]
    wanted = [(flag, mode.values), *beside]
    return " ".join(f"{name} {VALUES.get(name, (*values, '')[0])}".strip() for name, values in wanted)


def says(problems, mode, flag, name) -> bool:
    """Return whether a mode is refused for a protection, with its reason and a fix."""
    return any(
        reason.startswith(f"{flag} ") and f"by {name} (" in reason and reason.endswith(mode.why) and fix
        for reason, fix in problems
    )


def of_answer(dicts) -> list:
    return [(each["reason"], each["fix"]) for each in dicts]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The script of a checkout of Megatron-LM whose parser has all flags of the modes, and nothing else."""
    training = tmp_path / "Megatron-LM/megatron/training"
    training.mkdir(parents=True)
    (training / "training.py").write_text("")
    (training / "arguments.py").write_text("".join(f"add_argument('{flag}')\n" for _, flag in MODES))
    script = tmp_path / "Megatron-LM/pretrain_gpt.py"
    script.write_text("")
    return script


def is_known(flag: str) -> bool:
    """Return whether the installed megatron-core has the option of a flag."""
    return flag in arguments.all_flags()


@pytest.mark.parametrize(("mode", "flag"), MODES, ids=shown)
def test_a_mode_is_refused_by_the_trainer_if_the_protection_is_asked_for(mode, flag):
    if not is_known(flag):
        pytest.skip("an option of another release of megatron-core")
    for name in mode.protections:
        line, replicas = f"{LINE} {turned_on(mode, flag)} {ASKING[name]}", 2 * (name == table.REPLICAS)
        assert says(arguments.refusals(line, 1, has_te=True, replicas=replicas)[1], mode, flag, name)
    _, problems = arguments.refusals(f"{LINE} {turned_on(mode, flag)}", 1, has_te=True)
    assert not any(mode.why in reason for reason, _ in problems)


@pytest.mark.parametrize(("mode", "flag"), MODES, ids=shown)
def test_a_mode_is_refused_by_the_adapter_before_the_start_and_by_the_parsed_arguments(mode, flag, checkout):
    words = [*LINE.split(), *turned_on(mode, flag).split(), "--rerun-mode", "disabled"]
    view, _ = checkouts._view(words, SimpleNamespace(), 1)
    view.core.rerun_mode = "disabled"
    for entry in table.TABLE:
        asking, replicas = ASKING.get(entry.name, "--ft-hot-swap").split(), 2 * (entry.name == table.REPLICAS)
        _, problems = checkouts.examine_flags(Script(str(checkout), False, [*words, *asking]), 1, replicas)
        parsed = list(refusals.of_arguments(view.core, [entry]))
        if entry.name in mode.protections:
            assert says(problems, mode, flag, entry.name) and says(parsed, mode, flag, entry.name)
        else:
            assert not any(entry.name in reason and mode.why in reason for reason, _ in (*problems, *parsed))


@pytest.mark.parametrize(("mode", "flag"), MODES, ids=shown)
def test_ft_check_says_that_a_mode_is_refused(mode, flag, checkout):
    scripts = (CHECKOUT / "pretrain_gpt.py", checkout) if is_known(flag) else (checkout,)
    for script in scripts:
        words = [*LINE.split(), *turned_on(mode, flag).split()]
        for name in mode.protections:
            if ASKING[name]:
                assert says(of_answer(answer_for(script, [*words, *ASKING[name].split()], 1).refused), mode, flag, name)
        unprotected = answer_for(script, words, 1)
        assert not any(mode.why in reason for reason, _ in of_answer(unprotected.refused))
        lacking = {each["name"]: of_answer(each["needs"]) for each in unprotected.protections}
        for name in set(mode.protections) & set(lacking):
            assert says(lacking[name], mode, flag, name)


class Noting(Layer):
    """Notes what it is asked, and passes everything on."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def run_with_recovery(self, work):
        self.notes.append(f"{self.name} runs")
        return work()

    def compute(self, work):
        self.notes.append(f"{self.name} computes")
        return work()

    def update(self, step):
        self.notes.append(f"{self.name} updates")
        return step()

    def share(self, samples):
        return samples // 2

    def committed(self):
        self.notes.append(f"{self.name} commits")


def test_layers_are_entered_from_outside_and_the_update_from_inside():
    notes = []
    stack = Stack([Noting("outer", notes), Noting("inner", notes)])
    assert stack.run_with_recovery(lambda: stack.compute(lambda: stack.update(lambda: "updated"))) == "updated"
    stack.committed()
    assert notes == [
        *("outer runs", "inner runs", "outer computes", "inner computes", "inner updates", "outer updates"),
        *("inner commits", "outer commits"),
    ]
    assert stack.share(8) == 2


def test_without_layers_nothing_is_replaced():
    optimizer = SimpleNamespace(step=lambda: "stepped")
    step = optimizer.step
    Stack().protect(optimizer)
    assert optimizer.step is step and Stack().share(8) == 8 and Stack().begins()
    Stack([Layer()]).protect(optimizer)
    assert optimizer.step is not step and optimizer.step() == "stepped"


def test_the_trainer_knows_no_system():
    sources = (PAGE.parent.parent / "megatron" / "ft_trainer").rglob("*.py")
    assert [path for path in sources if "ft.systems" in path.read_text()] == []
