"""SPARe's division of a step among groups: every type once, whoever is lost; gradients and samples follow from it."""

import itertools

import pytest
import torch

from ft.observe.report.lineage import audit, depth, lineage, stacks_line, wipe_outs_line
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.samples import SampleAssignment
from ft.systems.spare.controller import Controller
from ft.systems.spare.layer import StackLoaders, StackStream
from ft.systems.spare.ledger import GradientStore
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import largest_redundancy, ruler
from ft.systems.spare.shares import divide, rearrange

SIZES = [(n, r) for n in range(3, 7) for r in range(2, largest_redundancy(n) + 1)] + [(7, 3), (13, 4)]


def controller(groups, redundancy):
    return Controller(Placement(groups, ruler(groups, redundancy)))


def shares_of(made, here, away=()):
    return divide(made, [group for group in range(made.groups) if made.alive[group] and group not in away], here)


def check(made, shares, here):
    """Every type is added once; whoever adds it computes it, and hosts it if any host is here."""
    assert sorted(kind for types in shares.adds.values() for kind in types) == list(range(made.groups))
    assert set(shares.computes) == set(here) == set(shares.adds)
    for group, types in shares.adds.items():
        assert set(types) <= set(shares.computes[group])
        assert set(types) <= {*made.order(group), *shares.adopted}


@pytest.mark.parametrize(("groups", "redundancy"), SIZES)
def test_every_type_is_added_once_whatever_is_lost(groups, redundancy):
    for count in range(redundancy):
        for lost in itertools.combinations(range(groups), count):
            made = controller(groups, redundancy)
            here = [group for group in range(groups) if group not in lost]
            shares = shares_of(made, here)
            check(made, shares, here)
            assert not shares.adopted and len(shares.patch) == count
            assert not rearrange(made, here)
            after = shares_of(made, here)
            check(made, after, here)
            assert not after.patch and after.most == made.stack


def test_a_lost_type_that_a_survivor_has_computed_needs_no_patch():
    made = controller(13, 4)
    rearrange(made, [group for group in range(13) if group != 2])
    here = [group for group in range(13) if made.alive[group]]
    before, spared = shares_of(made, here), 0
    for lost in here:
        after = shares_of(made, [group for group in here if group != lost])
        elsewhere = {kind for group in after.computes for kind in before.computes[group]}
        assert set(after.patch) == set(range(13)) - elsewhere == set(after.added_to(before))
        assert set(after.moved_from(before)) == set(before.adds[lost])
        spared += len(set(before.adds[lost]) & elsewhere)
    assert spared > 5


def test_nobody_that_is_left_gives_up_a_type_when_others_are_lost():
    made = controller(13, 4)
    rearrange(made, [group for group in range(13) if group not in (2, 7)])
    here = [group for group in range(13) if made.alive[group]]
    before = shares_of(made, here)
    for lost in (0, 5, 12):
        here = [group for group in here if group != lost]
        after = shares_of(made, here)
        assert all(set(before.adds[group]) <= set(after.adds[group]) for group in here)
        before = after


def test_the_types_of_a_wipe_out_go_to_the_groups_with_the_least_to_do():
    made = controller(7, 3)
    lost = made.placement.hosts(0)
    here = [group for group in range(7) if group not in lost]
    before, shares = shares_of(made, range(7)), shares_of(made, here)
    check(made, shares, here)
    assert shares.adopted == (0,) and shares.added_to(before) == tuple(sorted(lost))
    assert sorted(len(types) for types in shares.computes.values()) == [1, 2, 2, 2]
    away = rearrange(made, here)
    assert away == (6,)
    planned = shares_of(made, here, away)
    check(made, planned, here)
    assert planned.adopted == (0,) and planned.most <= made.stack + 1
    back = sorted([*here, lost[0]])
    assert shares_of(made, back, away).adds[here[0]] == planned.adds[here[0]], "who returns takes nothing away"
    assert rearrange(made, back) == () and not shares_of(made, back).patch


def test_one_group_that_is_left_computes_everything():
    made = controller(3, 2)
    shares = shares_of(made, [0])
    assert shares.adopted == (2,) and shares.adds[0] == (0, 1, 2)
    away = rearrange(made, [0])
    assert shares_of(made, [0], away).adds[0] == (0, 1, 2) and shares_of(made, [0], away).adopted == (2,)
    assert rearrange(made, [0, 1, 2]) == () and made.stack == 1 and made.alive.all()


def test_groups_that_return_are_worked_in_and_a_full_house_begins_anew():
    made = controller(7, 3)
    rearrange(made, [0, 1, 2, 3, 4])
    assert made.stack == 2
    rearrange(made, [0, 1, 2, 3, 4, 6])
    assert made.alive[6] and not made.alive[5]
    check(made, shares_of(made, [0, 1, 2, 3, 4, 6]), [0, 1, 2, 3, 4, 6])
    rearrange(made, list(range(7)))
    assert made.stack == 1 and made.orders.tolist() == controller(7, 3).orders.tolist()


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


def test_the_report_says_what_losses_and_wipe_outs_have_cost():
    positions = {0: 4, 1: 4, 2: 4}
    one = {"owners": (0, 0, 0), "healthy": (0,), "patch": (), "step_s": 3.0}
    lines = [
        commit({0: 0, 1: 0}, positions, step=1, patch=(1,), step_s=1.0),
        commit({0: 0, 1: 0, 2: 0}, positions, step=2, **{**one, "patch": (1, 2), "adopted": (2,)}),
        commit({0: 0, 1: 0, 2: 0}, positions, step=3, **{**one, "stack": 2, "patch": (2,), "adopted": (2,)}),
        commit({0: 0, 1: 0}, positions, step=4, patch=(), covered=(1,), stack=2),
    ]
    steps = lineage({0: lines}).steps
    assert [depth(step) for step in steps] == [2, 3, 3, 2]
    assert [depth(step, adopted=False) for step in steps] == [2, 2, 2, 2]
    assert "2.50 per step (mean), 3 at most; 4 patch computes in 3 steps, 1 lost shard had" in stacks_line(steps)
    said = "in 2 steps no host of a shard type was left: others computed 2 shards, which took 2"
    assert said in wipe_outs_line(steps)
    assert wipe_outs_line(steps[:1]) == ""


# --- the ledger ------------------------------------------------------------------------------------------------------


def test_what_was_never_exchanged_is_kept_too():
    ledger = GradientStore()
    ledger.want([3])
    ledger.begin([3], 1.0)
    waited = []
    first, second = torch.ones(4), torch.full((4,), 2.0)
    ledger.entering(0, [first], lambda: waited.append(0))()
    ledger.entering(1, [second], lambda: waited.append(1))
    ledger.take_all()
    second.mul_(0.5)  # as core does where it divides by tokens
    ledger.settle()
    assert ledger.types == (3,) and waited == [0, 1]
    ledger.want([3, 5])
    ledger.begin([5], 1.0)
    parts = [torch.full((4,), 10.0)], [torch.full((4,), 20.0)]
    for place, each in enumerate(parts):
        ledger.entering(place, each, None)()
    assert parts[0][0].tolist() == [11.0] * 4 and parts[1][0].tolist() == [22.0] * 4


def test_sums_and_tokens_are_those_of_all_types_that_are_added():
    ledger = GradientStore()

    def compute(kind, sums, tokens, wanted):
        ledger.want(wanted)
        ledger.begin([kind], 1.0)
        ledger.take_all()
        counted = torch.tensor(tokens)
        ledger.add_tokens(counted)
        found = ledger.add_sums(torch.tensor(sums)).tolist(), counted.item()
        ledger.settle()
        return found

    assert compute(0, [4.0, 2.0], 2, [0]) == ([4.0, 2.0], 2)
    assert compute(1, [1.0, 3.0], 3, [0, 1]) == ([5.0, 5.0], 5)
    assert compute(2, [1.0, 1.0], 1, [1, 2]) == ([2.0, 4.0], 4), "another group adds type 0"
    ledger.clear()
    assert compute(0, [7.0, 1.0], 1, [0, 1]) == ([7.0, 1.0], 1)


def test_a_pass_that_was_interrupted_is_not_kept():
    ledger = GradientStore()
    ledger.begin([0], 1.0)
    ledger.entering(0, [torch.ones(1)], None)()
    ledger.settle()
    assert ledger.types == ()


def test_a_copy_is_added_without_a_pass_when_its_group_is_lost_before_the_exchange():
    ledger, part = GradientStore(), torch.full((2,), 5.0)
    ledger.begin([1], 1.0, is_apart=True)
    ledger.entering(0, [part], None)
    ledger.take_all()
    ledger.settle()
    ledger.want([2])
    ledger.begin([2], 1.0)
    take = ledger.entering(0, [part := torch.full((2,), 7.0)], None)
    ledger.want([1, 2])  # the quorum becomes known
    take()
    assert part.tolist() == [12.0] * 2 and sorted(ledger.added) == [1, 2]


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
        for types in shares_of(made, here).adds.values():
            stream = StackStream(assignment, types, [step * shard] * len(types), shard) if types else None
            seen += [stream.index(position) for position in range(len(types) * shard)] if types else []
        rearrange(made, list(here))
    assert sorted(seen) == list(range(5 * 7 * shard))


def test_a_group_that_has_just_come_back_computes_what_nobody_else_can():
    """Planned were 0 and 1; both are lost, and 2 is here again before a step without them could be committed."""
    made = controller(3, 2)
    rearrange(made, [0, 1])
    shares = shares_of(made, [2])
    check(made, shares, [2])
    assert shares.adds[2] == (0, 2, 1) and shares.adopted == (1,)


def test_who_was_only_behind_is_not_planned_with_yet():
    made = controller(7, 3)
    rearrange(made, [0, 1, 2, 3, 4, 5])
    rearrange(made, [0, 1, 2, 3, 4])
    assert not made.alive[5] and not made.alive[6]
