"""Table of the modes of a checkout's trainer that no protection protects, with one row for each mode.

What depends on the protection is in the table of protections (:mod:`ft.protection.table`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ft.base.errors import Problem, UserError
from ft.protection.table import Entry, refused_modes


@dataclass(frozen=True)
class Row:
    """One mode of the trainer.

    Attributes:
        argument: the attribute of the trainer's parsed arguments.
        flag: the flag that sets it.
        why: why a run in this mode cannot be protected, as a clause.
        values: the values that are refused; empty: every value but None, False, 0 and "".
    """

    argument: str
    flag: str
    why: str
    values: tuple[str, ...] = ()


_OTHER_LOOP = "it does not train by the loop that is protected"
_OTHER_STATE = "its parameters and optimizer state are laid out in another way than snapshots know"
ROWS = (
    Row("perform_rl_step", "--perform-rl-step", _OTHER_LOOP),
    Row("skip_train", "--skip-train", "there is no training to protect"),
    Row("vision_pretraining", "--vision-pretraining", _OTHER_LOOP),
    Row("use_megatron_fsdp", "--use-megatron-fsdp", _OTHER_STATE),
    Row("use_torch_fsdp2", "--use-torch-fsdp2", _OTHER_STATE),
    Row("optimizer", "--optimizer", _OTHER_STATE, ("muon", "dist_muon")),
    Row("inprocess_restart", "--inprocess-restart", "it handles failures itself"),
    Row("enable_ft_package", "--enable-ft-package", "it handles failures itself"),
    Row("adlr_autoresume", "--adlr-autoresume", "it restarts the job itself"),
    Row("lazy_mpu_init", "--lazy-mpu-init", "its process groups are made outside of the trainer"),
    Row("fake_process_group", "--fake-process-group", "its ranks do not communicate"),
    Row("yaml_cfg", "--yaml-cfg", "arguments are read from the command line only"),
    Row("non_persistent_ckpt_type", "--non-persistent-ckpt-type", "each rank keeps files of its own", ("local",)),
    Row("ckpt_convert_format", "--ckpt-convert-format", "there is no training to protect"),
    Row("moe_use_upcycling", "--moe-use-upcycling", "it builds a second model at the start"),
    Row("iterations_to_skip", "--iterations-to-skip", "a skipped iteration is never committed"),
    Row("phase_transition_iterations", "--phase-transition-iterations", "data are read from another start"),
    Row("dataloader_type", "--dataloader-type", "its position cannot be restored exactly", ("external", "cyclic")),
    Row("hybrid_context_parallel", "--hybrid-context-parallel", "its batches are made across ranks"),
    Row("full_validation", "--full-validation", "the length of an evaluation is agreed on once"),
    Row("multiple_validation_sets", "--multiple-validation-sets", "the position in each of them is not kept"),
    Row("use_persistent_ckpt_worker", "--use-persistent-ckpt-worker", "the process that writes outlives a recovery"),
    Row("distributed_timeout_seconds_after_init", "--distributed-timeout-seconds-after-init", "ft run has deadlines"),
    Row("profile", "--profile", "a profiler cannot be entered again"),
    Row("log_straggler", "--log-straggler", "it exchanges times outside of the process groups"),
    Row("run_workload_inspector_server", "--run-workload-inspector-server", "it starts a server in each process"),
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
    for row in ROWS:
        value = getattr(arguments, row.argument, None)
        if _is_refused(row, value):
            yield _problem(row, str(value) if row.values else "")
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
        for row in ROWS:
            if row.flag == name:
                value = value or (flags[index + 1] if row.values and index + 1 < len(flags) else "")
                if not row.values or value in row.values:
                    yield _problem(row, value if row.values else "")


def refuse(problems: Iterator[Problem]) -> None:
    """Raise all ``problems`` as one error.

    Raises:
        UserError: there is a problem.
    """
    found = list(problems)
    if found:
        raise UserError.of(found)


def _is_refused(row: Row, value: Any) -> bool:
    return str(value) in row.values if row.values else value not in (None, False, 0, "", [])


def _problem(row: Row, value: str) -> Problem:
    shown = f"{row.flag} {value}".strip()
    return f"{shown} cannot be protected: {row.why}", f"drop {row.flag}, or the --ft flags"
