"""The quorum's production code with model replicas in simulated runs, and bugs planted into both."""

import os
import random

import pytest
from simulated import holds, seeds_to_try, told

from tests.simulation.__main__ import main
from tests.simulation.campaign import histories, named, planted
from tests.simulation.engine import Options
from tests.simulation.hsdp.faults import KINDS, Schedule
from tests.simulation.hsdp.shape import RING_LIMITS, Shape
from tests.simulation.hsdp.world import World

SIMULATION = named("hsdp")
SEEDS, UNSEEN = 30, 10
SHOWN_BY = {"ignores the lineage": ("change of sides",)}
"""Planted bug -> kinds of faults that show it soon; with all kinds it takes a minute."""


def test_the_first_seeds_hold_and_replicas_return_in_them():
    histories = [holds(SIMULATION, seed) for seed in range(SEEDS)]
    assert sum(history.counts["returns"] for history in histories) > SEEDS


def test_seeds_that_nobody_has_seen_hold():
    first = random.SystemRandom().randrange(1 << 32)
    for seed in range(first, first + UNSEEN):
        holds(SIMULATION, seed)


def test_without_faults_nothing_is_done_again():
    for seed in range(10):
        history = holds(SIMULATION, seed, Options(faults=0))
        assert (history.counts["redone"], history.counts["loads"], history.struck) == (0, 0, [])


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
def test_each_kind_of_fault_strikes_and_is_survived(kind):
    histories = [holds(SIMULATION, seed, Options(faults=5, kinds=(kind,))) for seed in range(5)]
    assert kind in {struck for history in histories for struck in history.struck}


@pytest.mark.parametrize("seed", range(5))
def test_after_a_checkpoint_only_the_first_attempt_at_a_step_may_take_as_long_as_a_checkpoint(seed):
    shape = Shape(3, 1, 1, 0.2, 0.1, 0.7, save_steps=5, save_s=2.0, hang_s=3.0, build_s=1.0)
    world = World(random.Random(seed), shape, Schedule(random.Random(seed), 0, None), None)
    world.start()
    while not any(life.aside_since for life in world.lives()):
        assert world.time.turn()
    began, step = world.time.now, world.checks.newest_step
    world.cut(0, 1, 100.0)
    while world.checks.newest_step == step:
        assert world.time.turn()
    assert world.time.now - began < shape.save_s + RING_LIMITS.aside_s + 8.0


def test_a_seed_replays_byte_for_byte_in_another_process(seed):
    text, code = told("hsdp", seed, hash_seed=1)
    assert code == 0 and text.startswith(f"seed {seed}: ")
    assert told("hsdp", seed, hash_seed=2) == (text, code)


@pytest.mark.long
def test_ten_thousand_seeds_hold():
    played = histories(SIMULATION, range(10_000), Options(8), os.cpu_count())
    assert not {one.seed: one.violation for one in played if one.violation}


@pytest.mark.parametrize("plant", SIMULATION.mutants, ids=lambda plant: plant.title)
def test_a_planted_bug_is_found(plant):
    with planted(plant):
        options = Options(faults=8, kinds=SHOWN_BY.get(plant.title))
        assert any(SIMULATION.play(seed, options).violation for seed in seeds_to_try("hsdp_protocol", plant.title))


def test_a_history_that_goes_wrong_is_told_with_its_seed(capsys):
    words = ["--seeds", "20", "--plant", "contributes gradients while it is behind"]
    assert main(["hsdp", *words]) == 0
    seed = capsys.readouterr().out.splitlines()[-1].split()[0]
    assert main(["hsdp", "--seed", seed, *words[2:]]) == 1
    assert f"seed {seed} violates: " in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--kinds", "rain"], ["--plant", "no such bug"], ["--seeds", "0"]])
def test_what_there_is_not_is_refused(words, capsys):
    assert main(["hsdp", *words]) != 0
    assert capsys.readouterr().err
