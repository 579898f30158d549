"""Format the results of ``ft simulate hsdp``, effective training times of FT-HSDP, as text and as JSON values."""

from typing import Any

from ft.lab.simulate.hsdp.answer import Answer, CaseResult, SimulationSettings, lost_gpu_hours
from ft.lab.simulate.hsdp.cases import Job, Stalls
from ft.lab.simulate.hsdp.history import EXPONENTIAL, PERIODIC, WEIBULL, Outcome
from ft.show.text import count, left_out, percent, seconds, table

LEFT_OUT = left_out(
    "what quorum, connections and fetch add at this size to our stalls", "cost of checkpoints", "spares and repairs"
)


def as_text(job: Job, ours: Stalls, settings: SimulationSettings, found: Answer) -> str:
    """Return what is left out, the parameters, a table of all cases, the sweeps, and an explanation of each figure.

    Args:
        job: the simulated job.
        ours: the stalls of this project.
        settings: settings of the simulation.
        found: the results.
    """
    parts = [LEFT_OUT, "", *_question(job, ours, settings), "", _cases(job, settings, found.found)]
    if found.by_replicas:
        names = [row.case.name for row in found.found]
        parts += ["", "Effective training time by number of replicas, a failure every " + seconds(job.interval_s)]
        parts += ["(simulated, independent failures)", "", _sweep("replicas", names, found.by_replicas)]
        parts += ["", f"Effective training time by time between two failures, {job.replicas} replicas"]
        parts += ["", _sweep("minutes", names, found.by_interval)]
    return "\n".join([*parts, "", *_meaning(settings)])


def as_values(job: Job, ours: Stalls, settings: SimulationSettings, found: Answer) -> dict[str, Any]:
    """Return the results as a JSON-serializable mapping; times are in seconds."""
    return {
        "gpus": job.gpus,
        "replicas": job.replicas,
        "interval_s": job.interval_s,
        "stalls": {"killed_s": ours.killed_s, "rejoin_s": ours.rejoin_s, "hung_s": ours.hung_s, "source": ours.source},
        "days": settings.days,
        "seed": settings.seed,
        "cases": {row.case.key: _values(job, row) for row in found.found},
        "by_replicas": found.by_replicas,
        "by_interval_min": found.by_interval,
    }


def _values(job: Job, row: CaseResult) -> dict[str, Any]:
    return {
        "name": row.case.name,
        "stall_s": row.case.stall_s,
        "rebuild_s": row.case.rebuild_s,
        "rejoin_s": row.case.rejoin_s,
        "formula": row.formula,
        "overlapping": row.overlapping,
        "simulated": {family: outcome.effective for family, outcome in row.simulated.items()},
        "lost_gpu_hours_per_day": lost_gpu_hours(job, row.simulated[EXPONENTIAL].effective),
    }


def _question(job: Job, ours: Stalls, settings: SimulationSettings) -> list[str]:
    hang = "3 steps + 1 s (goal)" if ours.hung_s is None else seconds(ours.hung_s)
    return [
        f"job        {job.gpus:,} GPUs in {job.replicas} replicas, steps of {seconds(job.step_s)}, a failure somewhere "
        f"every {seconds(job.interval_s)},",
        f"           a failed replica asks to rejoin after {seconds(job.rebuild_s)}",
        f"our stall  the others wait, in addition to a normal step, {seconds(ours.killed_s)} after a kill, {hang}",
        f"           after a hang, {seconds(ours.rejoin_s)} at a rejoin ({ours.source}); a repeated step is added",
        f"simulated  {settings.days:,.4g} days for each figure (a quarter of that in sweeps), seed {settings.seed}, "
        f"at least {count(settings.rules.minimum, 'replica')} in a step",
    ]


def _cases(job: Job, settings: SimulationSettings, rows: list[CaseResult]) -> str:
    def line(name: str, value) -> list[str]:
        return [name, *(value(row) for row in rows)]

    def usual(row: CaseResult) -> Outcome:
        return row.simulated[EXPONENTIAL]

    lines = [
        line("all wait after a failure", lambda row: seconds(row.case.stall_s)),
        line("all wait at a rejoin", lambda row: seconds(row.case.rejoin_s)),
        ["effective training time:"] + [""] * len(rows),
        line("  paper's formula", lambda row: percent(row.formula)),
        line("  simulated, every interval", lambda row: percent(row.simulated[PERIODIC].effective)),
        line("  overlaps, closed form", lambda row: percent(row.overlapping)),
        line("  simulated, independent", lambda row: percent(usual(row).effective)),
        line(f"  simulated, bursts ({settings.shape:g})", lambda row: percent(row.simulated[WEIBULL].effective)),
        ["independent failures:"] + [""] * len(rows),
        line("  time with all replicas", lambda row: percent(_with(row, usual(row), 0))),
        line("  with one replica absent", lambda row: percent(_with(row, usual(row), 1))),
        line("  with more absent", lambda row: percent(_fewer(row, usual(row)))),
        line(
            "  time in which all wait",
            lambda row: percent((usual(row).stalled + usual(row).too_few) / usual(row).lasted),
        ),
        line("  failures while one is absent", lambda row: percent(_share(usual(row).overlapping, usual(row)))),
        line("  failures of the absent one", lambda row: percent(_share(usual(row).during_rebuild, usual(row)))),
        line("GPU hours lost per day", lambda row: f"{lost_gpu_hours(job, usual(row).effective):,.0f}"),
    ]
    return table(["", *(row.case.name for row in rows)], lines, right=range(1, len(rows) + 1))


def _with(row: CaseResult, outcome: Outcome, less: int) -> float:
    return outcome.trained.get(row.case.replicas - less, 0.0) / outcome.lasted if row.case.replicas > less else 0.0


def _fewer(row: CaseResult, outcome: Outcome) -> float:
    return sum(time for members, time in outcome.trained.items() if members < row.case.replicas - 1) / outcome.lasted


def _share(number: int, outcome: Outcome) -> float:
    return number / max(outcome.failures, 1)


def _sweep(unit: str, names: list[str], rows: dict[Any, dict[str, float]]) -> str:
    lines = [[f"{key:g}", *(percent(value) for value in row.values())] for key, row in rows.items()]
    return table([unit, *names], lines, right=range(len(names) + 1))


def _meaning(settings: SimulationSettings) -> list[str]:
    return [
        "Meaning of the figures.",
        "  all restart       Synchronous recovery. The steps repeated since the checkpoint are not included, as in the",
        "                    paper (ft plan disruption includes them).",
        "  paper: 3 min      The stall in the paper's formula. The paper measures 3 minutes at the failure and 100 s",
        "                    more at the return (3 min + 100 s). After two fixes, it expects 1.5 minutes.",
        "  our stall         The stalls of a small model on one machine, and one repeated step of the large model.",
        "                    Nothing was measured at this size: no figure includes the time for quorum, connections",
        "                    and fetch with thousands of GPUs, and the time to rebuild a replica is the paper's.",
        "  paper's formula   One failure in every interval, handled before the next one: 44 % and 80 % in the paper.",
        "  overlaps          Independent failures: one may happen while another is handled. The result is higher than",
        "                    the formula's, because stalls that overlap are waited for only once.",
        f"  bursts            Weibull distribution of shape {settings.shape:g}: failures in bursts cost less each.",
        "  simulated         In addition, a replica returns at the end of a step, after any stall, and contributes one",
        "                    step later; if all replicas are lost at once, training resumes from a checkpoint.",
    ]
