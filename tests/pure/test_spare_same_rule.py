"""What the rules of SPARe charge is what the trainer computes, in random runs: patches, stacks, wipe-outs."""

import random
from types import SimpleNamespace

import pytest
import torch

from ft.job.quorum import Quorum
from ft.systems.spare.controller import Controller
from ft.systems.spare.layer import StackedWork
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler
from ft.systems.spare.shares import patches, rearrange

SIZES = [(3, 2), (4, 2), (5, 2), (6, 2), (7, 3), (13, 4), (31, 6), (60, 5)]
SHARD = 2


class Rules:
    """A run as the rules see it: the stacks of a step, and the patch computes and wipe-outs of its losses."""

    def __init__(self, placement):
        self.controller = Controller(placement, False)
        self.left, self.lost, self.patched = set(range(placement.groups)), set(), {}

    @property
    def stack(self):
        return self.controller.stack

    def lose(self, groups):
        """Lose groups at once in a step; return whether a type has no host, and the stacks that others compute."""
        self.lost.update(groups)
        self.left.difference_update(groups)
        found = patches(self.controller, self.lost, self.left)
        depth, self.patched = found.depth(self.patched), found.groups
        return bool(found.adopted), depth

    def committed(self):
        if self.lost:
            rearrange(self.controller, self.left)
            self.lost, self.patched = set(), {}


class Loaders:
    """Notes what a group reads; without data."""

    shard, position, types = SHARD, SHARD, ()

    def read(self, assignment, types, starts):
        self.types = tuple(types)

    def rest(self):
        self.types = ()


class Group:
    """One group of the trainer, without its model: the gradient of a type is a vector."""

    def __init__(self, group, placement, position):
        self.extra, self.loaders, self.computed, self.passes = {}, Loaders(), [], 0
        self.work = StackedWork(
            group, Controller(placement), position, lambda: self.extra, self.loaders, False, lambda step: None
        )

    def attempt(self, quorum, gradients):
        """Run the passes of an attempt; return the types that they have computed."""
        self.work.plan(quorum)
        types, self.taken = list(self.loaders.types), []
        while True:
            count = self.work.share(len(gradients) * SHARD) // SHARD
            mine, types = types[:count], types[count:]
            part = gradients[mine].mean(dim=0) if mine else torch.zeros_like(gradients[0])
            self.given, self.take = part, self.work.kept(0, [part[:2], part[2:]], None)
            self.taken += mine
            if not self.work.is_apart:
                break
            self.work.reduced(None)
            self.work.next_pass()
        assert not types, "all that is read is computed"
        self.computed += self.taken
        return self.taken

    def exchange(self):
        self.take()
        self.work.reduced(None)
        return self.given


class Trainer:
    """All groups of a run. Losses happen before the quorum of a step is known, or during its exchange."""

    def __init__(self, groups, redundancy):
        placement = Placement(groups, ruler(groups, redundancy))
        self.position = SimpleNamespace(step=0, lineage=0, positions={}, assignment=None)
        self.groups = {group: Group(group, placement, self.position) for group in range(groups)}
        self.here, self.planned = list(range(groups)), list(range(groups))
        self.gradients = torch.randn(groups, 6, dtype=torch.float64)

    def quorum(self):
        self.number = getattr(self, "number", 0) + 1
        return Quorum(self.number, self.position.step, 0, tuple(self.here), (), dict.fromkeys(self.here, 0))

    def step(self, losses, known):
        """Do a step during which groups are lost.

        Args:
            losses: the groups of each loss, in their order.
            known: whether the first loss is known before the exchange begins.

        Returns:
            for each loss: the largest number of types that a group computes because of it.
        """
        depths = []
        for group in self.here:
            self.groups[group].computed = []
            self.groups[group].attempt(None if group in self.planned else self.quorum(), self.gradients)
        self.units = {self.groups[group].work.units for group in self.here}
        for index, lost in enumerate(losses):
            self.here = [group for group in self.here if group not in lost]
            quorum = self.quorum()
            if index == 0 and known:
                problems = {self.groups[group].work.problem(quorum, True) for group in self.here}
                assert len(problems) == 1, "all groups decide alike"
                if problems == {""}:
                    depths.append(0)
                    continue
            for group in self.here:
                self.groups[group].exchange().fill_(float("nan"))  # nothing is left of what was exchanged
                self.groups[group].work.failed()
            depths.append(max(len(self.groups[group].attempt(quorum, self.gradients)) for group in self.here))
        whole = sum(self.groups[group].exchange() for group in self.here)
        assert torch.allclose(whole, self.gradients.sum(dim=0)), "a gradient is lost or added twice"
        computed = [self.groups[group].computed for group in self.here]
        assert all(len(set(types)) == len(types) for types in computed), "a group has computed a type twice"
        self.commit()
        return depths

    def commit(self):
        quorum = self.quorum()
        self.position.step, self.position.lineage = self.position.step + 1, quorum.number
        for group in self.here:
            self.groups[group].work.committed(quorum)
        self.last = self.groups[self.here[0]].work
        added = [kind for group in self.here for kind in self.groups[group].work.record()["computed"]]
        assert sorted(added) == list(range(len(self.groups)))
        self.planned = list(self.here)

    def come_back(self, group):
        """A group catches up: it gets the state of the others, and takes part in the next step."""
        self.groups[group].extra.clear()
        self.groups[group].extra.update(self.groups[self.here[0]].extra)
        self.here = sorted([*self.here, group])


def picked(rng, here, most):
    """Return random losses of a step, which leave a group."""
    here, losses = list(here), []
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        lost = rng.sample(here, min(rng.choice([1, 1, 1, 2, most]), len(here) - 1))
        here = [group for group in here if group not in lost]
        losses += [lost] if lost else []
    return losses


def test_the_message_names_types_without_a_host():
    trainer = Trainer(3, 2)
    trainer.here = [0]
    for group in trainer.here:
        trainer.groups[group].attempt(None, trainer.gradients)
    said = trainer.groups[0].work.problem(trainer.quorum(), True)
    assert said == "groups are lost, others compute the shard types 1, 2; no host is left of 2"


@pytest.mark.parametrize(("groups", "redundancy"), SIZES)
def test_the_trainer_computes_what_the_rules_charge(groups, redundancy):
    events = 0
    for seed in range(max(6, 200 // groups)):
        rng, trainer = random.Random(seed), Trainer(groups, redundancy)
        scheme = Rules(Placement(groups, ruler(groups, redundancy)))
        print(f"seed {seed}")
        wiped = False
        while not wiped and len(trainer.here) > 1:
            losses, stack, expected = picked(rng, trainer.here, 2), scheme.stack, []
            for lost in losses:
                is_wiped, patch = scheme.lose(lost)
                wiped |= is_wiped
                expected.append(patch)
            found = trainer.step(losses, known=rng.random() < 0.5)
            events += len(found)
            assert bool(trainer.last.adopted) == wiped and trainer.units == {stack}
            if not wiped:
                scheme.committed()
                assert found == expected
                assert bool(trainer.last.record()["patch"]) == any(expected)
    assert events > 40


@pytest.mark.parametrize(("groups", "redundancy"), SIZES[:-1])
def test_no_gradient_is_lost_while_groups_are_lost_and_come_back(groups, redundancy):
    for seed in range(max(4, 120 // groups)):
        rng, trainer, adopted = random.Random(seed), Trainer(groups, redundancy), 0
        print(f"seed {seed}")
        for _ in range(25):
            trainer.step(picked(rng, trainer.here, groups // 2), known=rng.random() < 0.5)
            adopted += bool(trainer.last.adopted)
            absent = sorted(set(range(groups)) - set(trainer.here))
            for group in rng.sample(absent, rng.randint(0, len(absent))):
                trainer.come_back(group)
        for group in sorted(set(range(groups)) - set(trainer.here)):
            trainer.come_back(group)
        trainer.step([], known=False)
        trainer.step([], known=False)
        assert trainer.last.record()["stack"] == 1 and not trainer.last.adopted and adopted
