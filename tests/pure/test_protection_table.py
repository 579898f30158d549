"""The table of protections: what it says is what the code does, and what the page says."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft.protection import table
from ft.protection.contract import Layer, Protection
from ft.protection.stack import Stack

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
