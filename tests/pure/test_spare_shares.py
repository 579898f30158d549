"""SPARe's division of a step among groups: every type once, whoever is lost; gradients and samples follow from it."""

import itertools

import pytest
import torch

from ft.observe.hsdp.audit import audit
from ft.observe.hsdp.lineage import lineage
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.samples import SampleAssignment
from ft.systems.spare.controller import Controller
from ft.systems.spare.ledger import GradientStore
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import largest_redundancy, ruler
from ft.systems.spare.shares import divide
from ft.systems.spare.stacked import StackLoaders, rearrange
from ft.systems.spare.stream import StackStream

SIZES = [(n, r) for n in range(3, 7) for r in range(2, largest_redundancy(n) + 1)] + [(7, 3), (13, 4)]


def controller(groups, redundancy):
    return Controller(Placement(groups, ruler(groups, redundancy)))


def shares_of(made, here):
    planned = [group for group in range(made.groups) if made.alive[group]]
    return divide(made.orders.tolist(), made.stack, planned, here)


def check(made, shares, here):
    """Every type has one owner, who hosts it."""
    computed = sorted(kind for types in shares.types.values() for kind in types)
    assert computed == sorted(set(range(made.groups)) - set(shares.lost))
    assert set(shares.types) == set(here)
    for group, types in shares.types.items():
        assert set(types) <= set(made.orders[group].tolist())


@pytest.mark.parametrize(("groups", "redundancy"), SIZES)
def test_every_type_is_computed_once_whatever_is_lost(groups, redundancy):
    for count in range(redundancy):
        for lost in itertools.combinations(range(groups), count):
            made = controller(groups, redundancy)
            here = [group for group in range(groups) if group not in lost]
            shares = shares_of(made, here)
            check(made, shares, here)
            assert not shares.lost and len(shares.patch) == count
            rearrange(made, here)
            after = shares_of(made, here)
            check(made, after, here)
            assert not after.patch and after.most <= made.stack


def test_nobody_that_is_left_gives_up_a_type_when_others_are_lost():
    made = controller(13, 4)
    rearrange(made, [group for group in range(13) if group not in (2, 7)])
    before = shares_of(made, [group for group in range(13) if made.alive[group]])
    for lost in (0, 5, 12):
        here = [group for group in before.types if group != lost]
        after = shares_of(made, here)
        assert all(set(before.types[group]) <= set(after.types[group]) for group in here)


def test_a_wipe_out_names_its_types():
    made = controller(3, 2)
    shares = shares_of(made, [0])
    assert shares.lost == (2,) and shares.types[0] == (0, 1)


def test_groups_that_return_are_worked_in_and_a_full_house_begins_anew():
    made = controller(7, 3)
    rearrange(made, [0, 1, 2, 3, 4])
    assert made.stack == 2
    rearrange(made, [0, 1, 2, 3, 4, 6])
    assert made.alive[6] and not made.alive[5]
    check(made, shares_of(made, [0, 1, 2, 3, 4, 6]), [0, 1, 2, 3, 4, 6])
    rearrange(made, list(range(7)))
    assert made.stack == 1 and made.orders.tolist() == controller(7, 3).orders.tolist()


@pytest.mark.parametrize(("groups", "redundancy"), SIZES)
def test_the_summed_gradient_is_the_same_for_every_pattern_of_lost_groups(groups, redundancy):
    """Groups compute, one exchange fails, those that are left compute what is missing: as the trainer does it."""
    generator = torch.Generator().manual_seed(groups)
    gradients = torch.randn(groups, 40, generator=generator)
    whole = gradients.sum(dim=0)
    for count in range(1, redundancy):
        for lost in itertools.combinations(range(groups), count):
            made = controller(groups, redundancy)
            ledgers = {group: GradientStore() for group in range(groups)}
            for here in (range(groups), [group for group in range(groups) if group not in lost]):
                given = attempt(shares_of(made, here), gradients, ledgers)
            assert torch.allclose(sum(given), whole, rtol=0, atol=1e-5)
            assert {kind for group in here for kind in ledgers[group].types} == set(range(groups))


def attempt(shares, gradients, ledgers):
    """What each group puts into the exchange, which fails and leaves nothing of it."""
    given = []
    for group, types in shares.types.items():
        todo = [kind for kind in types if kind not in ledgers[group].types]
        ledgers[group].begin(todo, float(len(todo)))
        # core's gradient is the mean over all microbatches of the schedule
        part = gradients[todo].mean(dim=0) if todo else torch.zeros(gradients.shape[1])
        parts = [part[:13].clone(), part[13:].clone()]
        ledgers[group].entering(0, parts, None)()
        given.append(torch.cat(parts))
        for each in parts:
            each.fill_(float("nan"))
        ledgers[group].settle()
    return given


# --- the audit -------------------------------------------------------------------------------------------------------


def commit(computed, positions, step=1, **values):
    """Of a step of 3 groups with shards of 4 samples, in which group 1 is away and group 0 has its type."""
    shown = {"healthy": (0, 2), "behind": (), "owners": (0, 0, 2), "patch": (1,), "stack": 1, **values}
    return Commit(
        step=step,
        quorum=step,
        before=step - 1,
        batch=4,
        assignment=SampleAssignment(3, 2),
        positions=positions,
        wall=float(step),
        computed=computed,
        **shown,
    )


@pytest.mark.parametrize(
    ("first", "second", "duplicates", "gaps"),
    [
        ({0: 0, 1: 0}, {2: 0}, 0, 0),
        ({0: 0}, {2: 0}, 0, 4),
        ({0: 0, 1: 0}, {2: 0, 1: 0}, 4, 0),
        ({0: 0, 1: 0}, None, 0, 0),
    ],
    ids=["right", "a type that nobody has computed", "a type that two have", "a line that is missing"],
)
def test_the_audit_believes_what_groups_have_read_and_not_what_was_planned(first, second, duplicates, gaps):
    positions = {0: 4, 1: 4, 2: 4}
    lines = {0: [commit(first, positions)], 2: [] if second is None else [commit(second, positions)]}
    found = audit(lineage(lines))
    assert (found.duplicates, found.gaps) == (duplicates, gaps)
    assert found.is_clean == (not duplicates and not gaps)


# --- the ledger ------------------------------------------------------------------------------------------------------


def test_what_was_never_exchanged_is_kept_too():
    ledger = GradientStore()
    ledger.begin([3], 1.0)
    waited = []
    first, second = torch.ones(4), torch.full((4,), 2.0)
    ledger.entering(0, [first], lambda: waited.append(0))()
    ledger.entering(1, [second], lambda: waited.append(1))
    ledger.take_all()
    second.mul_(0.5)  # as core does where it divides by tokens
    ledger.settle()
    assert ledger.types == (3,) and waited == [0, 1]
    ledger.begin([5], 1.0)
    parts = [torch.full((4,), 10.0)], [torch.full((4,), 20.0)]
    for place, each in enumerate(parts):
        ledger.entering(place, each, None)()
    assert parts[0][0].tolist() == [11.0] * 4 and parts[1][0].tolist() == [22.0] * 4


def test_sums_and_tokens_are_those_of_all_attempts():
    ledger = GradientStore()
    ledger.begin([0], 1.0)
    assert ledger.add_sums(torch.tensor([4.0, 2.0])).tolist() == [4.0, 2.0]
    tokens = torch.tensor(2)
    ledger.add_tokens(tokens)
    ledger.settle()
    ledger.begin([1], 1.0)
    assert ledger.add_sums(torch.tensor([1.0, 3.0])).tolist() == [5.0, 5.0]
    tokens = torch.tensor(3)
    ledger.add_tokens(tokens)
    assert tokens.item() == 5
    ledger.clear()
    ledger.begin([0], 1.0)
    assert ledger.add_sums(torch.tensor([7.0, 1.0])).tolist() == [7.0, 1.0]


# --- what is read ----------------------------------------------------------------------------------------------------


class Loader:
    """As ``MicrobatchLoader``, of which it notes what is asked for."""

    def __init__(self):
        self.dataset, self.consumed_samples, self.seeks = self, 0, 0

    def follow(self, stream):
        self.stream = stream

    def seek(self, position):
        self.consumed_samples, self.seeks = position, self.seeks + 1

    def take(self, count):
        first = self.consumed_samples
        self.consumed_samples += count
        return [self.stream.index(position) for position in range(first, first + count)]


def test_a_step_reads_its_types_one_after_the_other_each_from_its_own_stream():
    assignment, loader = SampleAssignment(3, 2), Loader()
    loaders = StackLoaders([None, loader], shard=4)
    loaders.read(assignment, (2, 0), (0, 0))
    expected = [assignment.stream(kind).index(position) for kind in (2, 0) for position in range(4)]
    assert loader.take(8) == expected and loaders.position == 4
    loaders.read(assignment, (2, 0), (4, 4))
    assert loader.seeks == 1, "the loaders come to the next step by themselves"
    loader.take(8)
    loaders.read(assignment, (1,), (4,))
    assert loader.seeks == 2 and loader.take(4) == [assignment.stream(1).index(position) for position in range(4, 8)]
    loaders(assignment, 0)
    assert loaders.position is None


def test_a_stack_s_stream_ends_where_the_data_ends():
    assignment = SampleAssignment(3, 2)
    stream = StackStream(assignment, (0, 2), (4, 4), shard=4)
    whole = 3 * 12
    assert stream.within(whole) == 2 * 8 and stream.within(whole - 1) == 8
    assert max(stream.index(position) for position in range(16)) < whole


def test_all_groups_together_read_each_sample_once():
    made, assignment, shard = controller(7, 3), SampleAssignment(7, 2), 4
    seen = []
    for step, here in enumerate([range(7), [0, 1, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6], [0, 3, 4, 5, 6], range(7)]):
        for types in shares_of(made, here).types.values():
            stream = StackStream(assignment, types, [step * shard] * len(types), shard) if types else None
            seen += [stream.index(position) for position in range(len(types) * shard)] if types else []
        rearrange(made, list(here))
    assert sorted(seen) == list(range(5 * 7 * shard))


def test_a_host_that_has_just_come_back_ends_a_wipe_out():
    """Planned were 0 and 1; 1 is lost, and 2 is here again before a step without 1 could be committed."""
    made = controller(3, 2)
    rearrange(made, [0, 1])
    for here in ([0, 2], [1, 2]):
        shares = shares_of(made, here)
        check(made, shares, here)
        assert not shares.lost and shares.patch
        committed = controller(3, 2)
        rearrange(committed, [0, 1])
        rearrange(committed, here)
        assert sorted(group for group in range(3) if committed.alive[group]) == here


def test_who_was_only_behind_is_not_planned_with_yet():
    made = controller(7, 3)
    rearrange(made, [0, 1, 2, 3, 4, 5])
    rearrange(made, [0, 1, 2, 3, 4])
    assert not made.alive[5] and not made.alive[6]
