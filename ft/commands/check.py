"""Define the command ``ft check``, which examines a launch line and prints its problems and requirements."""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import count
from ft.commands.check_line import Answer, answer_for
from ft.commands.protection import choose_trainer


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand ``check`` to the command ``ft``."""
    parser = subparsers.add_parser(
        "check",
        help="what a launch line will do and need: layout, memory, protections, what is refused",
        description="Say what a launch line will do and need, without starting anything and without a GPU.",
    )
    parser.add_argument(
        "--gpus",
        type=count(),
        metavar="N",
        help="ask about a run on N GPUs elsewhere, which have all that the line needs (default: about this machine, "
        "and the fewest GPUs that fit)",
    )
    parser.add_argument("--nnodes", type=count(), metavar="N", help="nodes of such a run, with --nproc-per-node")
    parser.add_argument("--nproc-per-node", type=count(), metavar="N", help="GPUs of each node of such a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text; memory in bytes")
    parser.add_argument("script", help="pretrain_gpt.py of this project or of a Megatron-LM checkout")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the result of the check.

    Return 0 if the line is accepted, 2 if it is refused, and 1 if only this machine lacks what it needs.
    """
    choose_trainer(given)
    answer = answer_for(Path(given.script), given.script_args, _gpus(given))
    print(json.dumps(answer.as_dict()) if given.json else _text(answer))
    return 2 if answer.refused else int(not answer.accepted)


def _gpus(given: argparse.Namespace) -> int | None:
    if given.gpus is not None and (given.nnodes or given.nproc_per_node):
        raise UserError("--gpus cannot be combined with --nnodes or --nproc-per-node", "give one of them")
    if given.nnodes is None and given.nproc_per_node is None:
        return given.gpus
    return (given.nnodes or 1) * (given.nproc_per_node or 1)


def _text(answer: Answer) -> str:
    lines = [_verdict(answer)]
    for number, entry in enumerate(answer.refused, 1):
        lines += [f"  {number}. {entry['reason']}", f"     fix: {entry['fix']}"]
    lines.append(f"needs: {', '.join(answer.needs) or 'nothing but this machine'}")
    if answer.layout is not None:
        sizes = " x ".join(f"{name.upper()}{size}" for name, size in answer.layout.items() if name != "world_size")
        lines.append(f"layout: {answer.layout['world_size']} GPU(s): {sizes}")
    if answer.batch is not None:
        lines.append("batch: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in answer.batch.items()))
    lines += _memory(answer)
    for each in answer.protections:
        lines.append(f"{each['name']} ({each['asked_by']}): {'fits' if each['fits'] else 'does not fit'}")
        lines += [f"  {entry['reason']}; {entry['fix']}" for entry in each["needs"]]
    if answer.seams:  # the functions of a Megatron-LM checkout that protections depend on
        changed = [each for each in answer.seams if each["differs"]]
        fitting = len(answer.seams) - len(changed)
        lines.append(f"checkout: {fitting} of {len(answer.seams)} functions that protections depend on are as expected")
        lines += [f"  {each['file']}: {each['symbol']} {each['differs']}; {each['why']}" for each in changed]
    return "\n".join([*lines, *answer.notices])


def _verdict(answer: Answer) -> str:
    if answer.refused:
        return f"refused: {len(answer.refused)} problem(s)"
    if answer.missing:
        return f"not here: needs {', '.join(answer.missing)}; --gpus N asks about a run on N GPUs elsewhere"
    return "accepted" + (f" on machines that have: {', '.join(answer.needs)}" if answer.needs else "")


def _memory(answer: Answer) -> list[str]:
    if answer.memory is None:
        return []
    lines = [f"memory per GPU, estimated ({answer.memory['assumes']}):"]
    for place in ("gpu", "host"):
        for name, size in answer.memory[place].items():
            lines.append(f"  {place}, {name.replace('_', ' ')}: {size / 1e9:.2f} GB")
    return lines
