"""The production code of control plane and workers in simulated clusters, and bugs planted into it."""

import os
import random
import re

import pytest
from simulated import holds, seeds_to_try, told

from tests.simulation.__main__ import main
from tests.simulation.campaign import histories, named, planted
from tests.simulation.control.faults import HARMLESS, KINDS
from tests.simulation.engine import Options

SIMULATION = named("control")
SEEDS = 150


def test_the_first_seeds_hold():
    outcomes = {holds(SIMULATION, seed).outcome for seed in range(SEEDS)}
    assert {"finished", "recovered and finished", "restarted and finished", "stopped: too few nodes left"} <= outcomes


def test_seeds_that_nobody_has_seen_hold():
    first = random.SystemRandom().randrange(1 << 32)
    for seed in range(first, first + SEEDS):
        holds(SIMULATION, seed)


def test_a_device_is_not_given_up_while_its_agent_is_stopped():
    history = holds(SIMULATION, 79320339)
    assert {"pause", "pause an agent"} <= {struck for struck, _ in history.struck}
    assert history.outcome == "restarted and finished"


def test_without_faults_every_run_is_finished_in_its_first_epoch():
    for seed in range(20):
        history = holds(SIMULATION, seed, Options(faults=0))
        assert (history.outcome, history.counts["epochs"], history.counts["restarts"]) == ("finished", 1, 0)


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
def test_each_kind_of_fault_strikes_and_is_survived(kind):
    histories = [holds(SIMULATION, seed, Options(faults=9, kinds=(kind,))) for seed in range(12)]
    assert kind in {struck for history in histories for struck, _ in history.struck}
    if kind in HARMLESS:
        assert {history.outcome for history in histories} <= {"finished", "recovered and finished"}
        assert not any(history.counts["restarts"] for history in histories)


def test_a_seed_replays_byte_for_byte_in_another_process(seed):
    text, code = told("control", seed, hash_seed=1)
    assert code == 0 and text.startswith(f"seed {seed}: ")
    assert told("control", seed, hash_seed=2) == (text, code)


def test_telling_a_history_does_not_change_it():
    for seed in range(20):
        quiet, told_one = SIMULATION.play(seed), SIMULATION.play(seed, with_lines=True)
        told_one.lines = []
        assert quiet == told_one


@pytest.mark.long
def test_ten_thousand_seeds_hold():
    played = histories(SIMULATION, range(10_000), Options(9), os.cpu_count())
    assert not {one.seed: one.violation for one in played if one.violation}


@pytest.mark.parametrize("plant", SIMULATION.mutants, ids=lambda plant: plant.title)
def test_a_planted_bug_is_found(plant):
    with planted(plant):
        assert any(SIMULATION.play(seed).violation for seed in seeds_to_try("control", plant.title))


def test_a_failure_is_told_with_its_seed_its_property_and_its_history(capsys):
    given = ["--seeds", "50", "--plant", "restores a step one too old"]
    assert main(["control", *given]) == 0
    table = capsys.readouterr().out
    seed = re.search(r"^ +(\d+)  restores a step one too old", table, re.MULTILINE).group(1)
    assert main(["control", "--seed", seed, *given[2:]]) == 1
    text = capsys.readouterr().out
    assert f"seed {seed} violates: step " in text and "FAULT" in text and '"kind":"Repair"' in text


def test_many_seeds_are_summed_up_alike_by_one_process_and_by_two(capsys):
    sums = []
    for jobs in ("1", "2"):
        assert main(["control", "--seeds", "60", "--jobs", jobs]) == 0
        sums.append(capsys.readouterr().out.splitlines())
    assert "violations: 0" in sums[0] and "faults by the phase they struck in" in "\n".join(sums[0])
    assert sums[0][1:] == sums[1][1:]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--plant", "none such"], "no bug is called 'none such'"),
        (["--kinds", "kill,typo"], "there is no kind of fault 'typo'"),
        (["--ranks", "1"], "--ranks 1"),
        (["--seeds", "0"], "--seeds 0"),
        (["--seed", "1", "--plant", "all"], "a single seed cannot be simulated with all bugs"),
    ],
)
def test_what_cannot_be_simulated(given, words, capsys):
    assert main(["control", *given]) == 2
    assert words in capsys.readouterr().err
