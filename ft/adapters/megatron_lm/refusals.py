"""The modes of a checkout's trainer that no protection protects.

What depends on the protection is in the table of protections (:mod:`ft.protection.table`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ft.base.errors import Problem
from ft.protection.table import Entry, Mode, refused_modes


def _mode(flag: str, why: str, *values: str) -> Mode:
    """Return a mode that no protection protects; without ``values``, every value of the flag turns it on."""
    return Mode((flag,), (), why, values=values)


_OTHER_LOOP = "it does not train by the loop that is protected"
_OTHER_STATE = "its parameters and optimizer state are laid out in another way than snapshots know"
MODES = (
    _mode("--perform-rl-step", _OTHER_LOOP),
    _mode("--skip-train", "there is no training to protect"),
    _mode("--vision-pretraining", _OTHER_LOOP),
    _mode("--use-megatron-fsdp", _OTHER_STATE),
    _mode("--optimizer", _OTHER_STATE, "muon", "dist_muon"),
    _mode("--inprocess-restart", "it handles failures itself"),
    _mode("--enable-ft-package", "it handles failures itself"),
    _mode("--adlr-autoresume", "it restarts the job itself"),
    _mode("--lazy-mpu-init", "its process groups are made outside of the trainer"),
    _mode("--fake-process-group", "its ranks do not communicate"),
    _mode("--yaml-cfg", "arguments are read from the command line only"),
    _mode("--non-persistent-ckpt-type", "each rank keeps files of its own", "local"),
    _mode("--ckpt-convert-format", "there is no training to protect"),
    _mode("--moe-use-upcycling", "it builds a second model at the start"),
    _mode("--iterations-to-skip", "a skipped iteration is never committed"),
    _mode("--phase-transition-iterations", "data are read from another start"),
    _mode("--dataloader-type", "its position cannot be restored exactly", "external", "cyclic"),
    _mode("--hybrid-context-parallel", "its batches are made across ranks"),
    _mode("--full-validation", "the length of an evaluation is agreed on once"),
    _mode("--multiple-validation-sets", "the position in each of them is not kept"),
    _mode("--use-persistent-ckpt-worker", "the process that writes outlives a recovery"),
    _mode("--distributed-timeout-seconds-after-init", "ft run has deadlines"),
    _mode("--profile", "a profiler cannot be entered again"),
    _mode("--log-straggler", "it exchanges times outside of the process groups"),
    _mode("--run-workload-inspector-server", "it starts a server in each process"),
)


def of_arguments(
    arguments: Any, asked: Iterable[Entry], *, intercepts_operators: bool = False, divides_steps: bool = False
) -> Iterator[Problem]:
    """Yield (problem, fix) for the trainer's parsed ``arguments``.

    Args:
        intercepts_operators: whether a protection verifies every operator of a step.
        divides_steps: whether several replicas compute a step together.
    """
    yield from of_rerun_mode(arguments.rerun_mode, intercepts_operators, divides_steps)
    for mode in MODES:
        yield from (_problem(mode, flag, value) for flag, value in mode.given(arguments))
    yield from refused_modes(arguments, asked)


def of_rerun_mode(mode: str, intercepts_operators: bool, divides_steps: bool) -> Iterator[Problem]:
    """Yield (problem, fix) for each requested protection that the rerun state machine of the trainer excludes.

    Args:
        mode: value of ``--rerun-mode``.
    """
    if mode == "disabled":
        return
    fix = "add --rerun-mode disabled"
    if intercepts_operators:
        yield f"--rerun-mode {mode} repeats steps by itself, and so does double execution", fix
    if divides_steps:
        yield f"--rerun-mode {mode} repeats a step on one replica, and replicas exchange gradients once in a step", fix


def of_flags(flags: Sequence[str]) -> Iterator[Problem]:
    """Yield (problem, fix) for a command line, which is not parsed by the trainer's own parser yet."""
    for index, text in enumerate(flags):
        name, _, value = text.partition("=")
        for mode in MODES:
            if name in mode.flags:
                value = value or (flags[index + 1] if mode.values and index + 1 < len(flags) else "")
                if not mode.values or value in mode.values:
                    yield _problem(mode, name, value)


def _problem(mode: Mode, flag: str, value: str) -> Problem:
    shown = f"{flag} {value}" if mode.values else flag
    return f"{shown} cannot be protected: {mode.why}", f"drop {flag}, or the --ft flags"
