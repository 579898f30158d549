"""``ft simulate hsdp``."""

import argparse
import json
from pathlib import Path

from ft.errors import UserError
from ft.inject.distributions import parse_duration
from ft.simulate.hsdp.answer import Means, answer
from ft.simulate.hsdp.cases import Job, Stalls, read
from ft.simulate.hsdp.history import Rules
from ft.simulate.hsdp.table import as_text, as_values

_DESCRIPTION = """\
Effective training time of FT-HSDP: by the formula of its paper (section 6.1), in closed form with failures that
overlap, and simulated, with the paper's stalls and with this code's. Times are seconds, or a number with ms, s, m, h
or d."""
_KILLED_S, _REJOIN_PART = 0.3, 0.3


def add_parser(simulations) -> None:
    """Adds the subcommand."""
    parser = simulations.add_parser(
        "hsdp",
        help="effective training time of FT-HSDP at any size, with the paper's stalls and with ours",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("job")
    group.add_argument("--gpus", type=_count, default=98304, metavar="N", help="default: 98304")
    group.add_argument("--replicas", type=_count, default=12, metavar="N", help="default: 12")
    group.add_argument("--mtbf-min", type=_minutes, default=1080.0, metavar="M", help=_INTERVAL)
    group.add_argument("--step", type=_time, default=20.0, metavar="TIME", help="a training step (default: 20 s)")
    group.add_argument("--rebuild", type=_time, default=600.0, metavar="TIME", help=_REBUILD)
    group.add_argument("--minimum", type=_count, default=1, metavar="N", help="replicas without which nobody trains")
    group.add_argument("--checkpoint-interval", type=_count, default=100, metavar="STEPS", help="default: 100")
    group = parser.add_argument_group("this code's stalls, beyond a normal step")
    group.add_argument("--stall", type=_time0, metavar="TIME", help=f"after a kill (default: {_KILLED_S} s, the goal)")
    group.add_argument("--hang-stall", type=_time0, metavar="TIME", help="after a hang (default: 3 steps + 1 s)")
    group.add_argument("--rejoin-stall", type=_time0, metavar="TIME", help="at a return (default: 0.3 steps, the goal)")
    group.add_argument("--results", metavar="FILE", help="kill and return from lines of tools/bench/hsdp_recovery.py")
    group = parser.add_argument_group("simulation")
    group.add_argument("--days", type=_days, default=365.0, metavar="N", help="of each history (default: 365)")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    group.add_argument("--shape", type=_shape, default=0.7, metavar="K", help=_SHAPE)
    group.add_argument("--no-sweep", action="store_true", help="leave the sweeps out")
    group.add_argument("--json", action="store_true", help="one JSON object instead of text, times in seconds")
    group.add_argument("--plot", metavar="FILE", help="a picture of it, PNG")
    parser.set_defaults(main=run)


_INTERVAL = "minutes between two failures anywhere (default: 18)"
_REBUILD = "from a failure until its replica asks to be let in (default: 10 m); as long all wait without FT-HSDP"
_SHAPE = "of the Weibull distribution of failures that come in bursts (default: 0.7)"


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison, and draws it where that is asked for.

    Raises:
        UserError: the question makes no sense, or the picture cannot be written.
    """
    job, ours = _job(arguments), _stalls(arguments)
    means = Means(
        Rules(arguments.minimum, arguments.checkpoint_interval), arguments.days, arguments.seed, arguments.shape
    )
    found = answer(job, ours, means, sweep=not arguments.no_sweep)
    print(json.dumps(as_values(job, ours, means, found)) if arguments.json else as_text(job, ours, means, found))
    if arguments.plot is not None:
        # Matplotlib takes longer to import than all else here.
        from ft.simulate.hsdp.picture import draw

        try:
            draw(job, found, Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0


def _job(given: argparse.Namespace) -> Job:
    if given.gpus % given.replicas:
        raise UserError(f"{given.gpus} GPUs make no {given.replicas} equal replicas", "give a multiple of --replicas")
    if given.replicas < 2:
        raise UserError("one replica has no other that trains on", "give --replicas 2 or more")
    if given.minimum > given.replicas:
        raise UserError(f"a minimum of {given.minimum} of {given.replicas} replicas", "give at most --replicas")
    if given.plot is not None and given.no_sweep:
        raise UserError("--plot draws the sweeps, which --no-sweep leaves out", "give one of them")
    return Job(given.gpus, given.replicas, given.mtbf_min, given.step, given.rebuild)


def _stalls(given: argparse.Namespace) -> Stalls:
    said = [value for value in (given.stall, given.hang_stall, given.rejoin_stall) if value is not None]
    if given.results is not None:
        if said:
            raise UserError("--results and stalls beside it, which are part of it", "give one or the other")
        return read(given.results)
    rejoin = _REJOIN_PART * given.step if given.rejoin_stall is None else given.rejoin_stall
    killed = _KILLED_S if given.stall is None else given.stall
    return Stalls(killed, rejoin, given.hang_stall, "given" if said else "the goals, nothing measured")


def _count(text: str) -> int:
    if not text.strip().replace(",", "").isdecimal() or int(text.replace(",", "")) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text.replace(",", ""))


def _minutes(text: str) -> float:
    return 60.0 * _between(text, 0.1, 1e6)


def _days(text: str) -> float:
    return _between(text, 0.01, 1e5)


def _shape(text: str) -> float:
    return _between(text, 0.1, 100.0)


def _between(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
    return value


def _time(text: str) -> float:
    return _seconds(text, 1e-3)


def _time0(text: str) -> float:
    return _seconds(text, 0.0)


def _seconds(text: str, least: float) -> float:
    try:
        return parse_duration(text, least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; seconds, or a number with ms, s, m, h or d") from error
