"""Plays one seed of a simulation, here or in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def told(name, seed, hash_seed):
    """Return what a process of its own prints of one seed of the simulation ``name``, and its exit code."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "tests.simulation", name, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, timeout=180, env=environment, cwd=ROOT, check=False)
    return done.stdout, done.returncode


def holds(simulation, seed, options=None):
    """Play one seed and return its history, in which no invariant may be violated."""
    print("seed", seed)
    history = simulation.play(seed, options)
    assert not history.violation, f"python -m tests.simulation {simulation.name} --seed {seed}: {history.violation}"
    return history
