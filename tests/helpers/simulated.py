"""Plays one seed of a simulation, here or in a process of its own."""

from pythons import python


def told(name, seed, hash_seed):
    """Return what a process of its own prints of one seed of the simulation ``name``, and its exit code."""
    done = python("-m", "tests.simulation", name, "--seed", seed, PYTHONHASHSEED=str(hash_seed))
    return done.stdout, done.returncode


def holds(simulation, seed, options=None):
    """Play one seed and return its history, in which no invariant may be violated."""
    print("seed", seed)
    history = simulation.play(seed, options)
    assert not history.violation, f"python -m tests.simulation {simulation.name} --seed {seed}: {history.violation}"
    return history
