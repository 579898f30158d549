"""The command ``ft simulate hsdp``: estimate the effective training time of FT-HSDP on a cluster with failures.

It compares the stalls that FT-HSDP publishes with those of this implementation. A stall is the time that the other
replicas wait, beyond a normal step, when a replica fails or returns.
"""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import argument, between, count, duration
from ft.lab.simulate.hsdp.answer import SimulationSettings, answer
from ft.lab.simulate.hsdp.cases import Job, Stalls, read
from ft.lab.simulate.hsdp.history import Rules
from ft.lab.simulate.hsdp.table import as_text, as_values

_DESCRIPTION = """\
Compute the effective training time of FT-HSDP by the formula of its paper (section 6.1), by a closed form with
overlapping failures, and by simulation, with the stalls of the paper and with those of this implementation.
Times have a unit: ms, s, m or min, h, d."""
_KILLED_S, _REJOIN_PART = 0.3, 0.3
"""Default stalls: seconds after a kill; fraction of a step when a replica rejoins."""


def add_parser(simulations) -> None:
    """Add the subcommand ``hsdp``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "hsdp",
        help="compute the effective training time of FT-HSDP at any size",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("job")
    group.add_argument("--gpus", type=count(), default=98304, metavar="N", help="default: 98304")
    group.add_argument("--replicas", type=count(1, _MOST_REPLICAS), metavar="N", help=_REPLICAS)
    group.add_argument("--mtbf-gpu", type=duration(), metavar="TIME", help=_GPU)
    group.add_argument("--mtbf", type=duration(6.0), metavar="TIME", help=_INTERVAL)
    group.add_argument("--mtbf-min", dest="mtbf", type=duration(6.0, bare=60.0), help=argparse.SUPPRESS)
    group.add_argument("--step", type=duration(), default=20.0, metavar="TIME", help="a training step (default: 20 s)")
    group.add_argument("--rebuild", type=duration(), default=600.0, metavar="TIME", help=_REBUILD)
    group.add_argument("--minimum", type=count(), default=1, metavar="N", help="minimum number of replicas in a step")
    group.add_argument("--checkpoint-interval", type=count(), default=100, metavar="STEPS", help="default: 100")
    group = parser.add_argument_group("stalls of this implementation, beyond a normal step")
    group.add_argument(
        "--stall", type=duration(0.0), metavar="TIME", help=f"stall after a kill (default: {_KILLED_S} s, the goal)"
    )
    group.add_argument("--hang-stall", type=duration(0.0), metavar="TIME", help="after a hang (default: 3 steps + 1 s)")
    group.add_argument(
        "--rejoin-stall",
        type=duration(0.0),
        metavar="TIME",
        help="stall when a replica rejoins (default: 0.3 steps, the goal)",
    )
    group.add_argument(
        "--results", metavar="FILE", help="take both stalls from a result file of tools/bench/hsdp_recovery.py"
    )
    group = parser.add_argument_group("simulation")
    group.add_argument("--time", type=duration(864.0), default=_YEAR_S, metavar="TIME", help=_TIME)
    group.add_argument("--days", dest="time", type=duration(864.0, bare=86400.0), help=argparse.SUPPRESS)
    group.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    group.add_argument("--shape", type=argument(between(0.1, 100.0)), default=0.7, metavar="K", help=_SHAPE)
    group.add_argument("--no-sweep", action="store_true", help="omit the sweeps")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text; times are in seconds"
    )
    group.add_argument("--plot", metavar="FILE", help="a picture of it, PNG")
    parser.set_defaults(main=run)


_GPU_MTBF_S = 18 * 60.0 * 98304
"""Mean time between failures of one GPU, in seconds, from FT-HSDP: one failure every 18 minutes on 98,304 GPUs."""
_YEAR_S = 365 * 86400.0
_REPLICAS_AT_MOST, _MOST_REPLICAS = 12, 1000
_REPLICAS = f"number of replicas; default: the largest number up to {_REPLICAS_AT_MOST} that --gpus can be divided by"
_GPU = (
    f"mean time between two failures of one GPU (default: {_GPU_MTBF_S / 86400:.1f}d, 18 min between those of 98,304)"
)
_INTERVAL = "mean time between two failures anywhere (default: --mtbf-gpu divided by the number of GPUs)"
_TIME = "virtual duration of each simulated run (default: 365d)"
_REBUILD = (
    "time from a failure until its replica asks to rejoin (default: 10 m); without FT-HSDP, all GPUs wait for this time"
)
_SHAPE = "shape of the Weibull distribution of bursty failures (default: 0.7)"


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison of the stalls, as text or JSON, plot it if requested, and return the exit status 0.

    Raises:
        UserError: the arguments contradict each other, or the plot cannot be written.
    """
    job, ours = _job(arguments), _stalls(arguments)
    means = SimulationSettings(
        Rules(arguments.minimum, arguments.checkpoint_interval), arguments.time / 86400, arguments.seed, arguments.shape
    )
    found = answer(job, ours, means, sweep=not arguments.no_sweep)
    print(json.dumps(as_values(job, ours, means, found)) if arguments.json else as_text(job, ours, means, found))
    if arguments.plot is not None:
        # Imported here because importing matplotlib takes longer than everything else in this command.
        from ft.lab.simulate.hsdp.picture import draw

        try:
            draw(job, found, Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0


def _job(given: argparse.Namespace) -> Job:
    replicas = given.replicas or max(each for each in range(1, _REPLICAS_AT_MOST + 1) if given.gpus % each == 0)
    if given.gpus % replicas:
        raise UserError(
            f"{given.gpus} GPUs cannot be divided into {replicas} equal replicas", "give a multiple of --replicas"
        )
    if replicas < 2:
        raise UserError(
            f"{given.gpus} GPUs are in one replica, so no other replica could continue",
            "give --replicas 2 or more, and a multiple of it as --gpus",
        )
    if given.minimum > replicas:
        raise UserError(f"a minimum of {given.minimum} of {replicas} replicas", "give at most --replicas")
    if given.plot is not None and given.no_sweep:
        raise UserError("--plot draws the sweeps, which --no-sweep omits", "give one of them")
    if given.mtbf is not None and given.mtbf_gpu is not None:
        raise UserError("--mtbf of all GPUs and --mtbf-gpu of one GPU define the same thing", "give one of them")
    interval = given.mtbf or (given.mtbf_gpu or _GPU_MTBF_S) / given.gpus
    return Job(given.gpus, replicas, interval, given.step, given.rebuild)


def _stalls(given: argparse.Namespace) -> Stalls:
    said = [value for value in (given.stall, given.hang_stall, given.rejoin_stall) if value is not None]
    if given.results is not None:
        if said:
            raise UserError("--results already includes the stalls that are given by flags", "give one or the other")
        return read(given.results)
    rejoin = _REJOIN_PART * given.step if given.rejoin_stall is None else given.rejoin_stall
    killed = _KILLED_S if given.stall is None else given.stall
    return Stalls(killed, rejoin, given.hang_stall, "given" if said else "the goals, not measured")
