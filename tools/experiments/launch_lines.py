"""Which launch lines of NVIDIA's functional tests the trainer takes, and whether it configures megatron-core alike.

    python tools/experiments/launch_lines.py [--against TREE]

Each line is read and checked as ``ft check`` does. With ``--against``, the lines of that Megatron-LM tree are also
parsed by its own parser, and the fields of megatron-core's configuration are compared. The tree's parser runs in a
process of its own; it needs six, regex and pydantic.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import launch_lines as lines  # noqa: E402

from ft.commands.check_line import answer_for  # noqa: E402
from megatron.training.arguments import read  # noqa: E402
from megatron.training.arguments.known import OTHER_PROGRAMS, without_effect  # noqa: E402

_REFERENCE = Path(__file__).with_name("launch_lines_reference.py")
_GENERATION = "the flags of text generation have no effect on training"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="TREE", help="compare configurations with this tree's parser")
    given = parser.parse_args()
    for tree in lines.trees():
        print(f"== {tree.name}")
        _accepted(lines.lines_of(tree))
    if given.against:
        print(f"== configurations of {given.against.name}")
        _compared(given.against)
    return 0


def _accepted(found: dict[str, list[str]]) -> None:
    parsed = trained = others = 0
    why: Counter[str] = Counter()
    rows = []
    for name, words in found.items():
        _, problems, _ = read(words)
        parsed += not problems
        answer = answer_for(ROOT / "pretrain_gpt.py", words, None)
        other = _is_other_program(words)
        others += other
        trained += answer.accepted and not other
        reasons = list(dict.fromkeys(entry["reason"] for entry in answer.refused))
        why.update(reasons if not other else [])
        verdict = "accepted" if answer.accepted else "another program" if other else "refused"
        rows.append(f"  {name:<100} {verdict}" + (f": {'; '.join(reasons)[:200]}" if verdict == "refused" else ""))
    training = len(found) - others
    print(f"parsed {parsed} of {len(found)} ({parsed / len(found):.1%})")
    print(f"accepted {trained} of the {training} that train ({trained / training:.1%})")
    print("\n".join(rows))


def _is_other_program(words: list[str]) -> bool:
    """Return whether a line is of another program: reinforcement learning, or text generation."""
    flags = {word for word in words if word.startswith("--")}
    rl = any(flag.startswith(("--rl-", "--grpo-", "--export-")) or flag in ("--flextron",) for flag in flags)
    generates = any(without_effect(flag) == _GENERATION for flag in flags)
    assert OTHER_PROGRAMS
    return rl or (generates and not flags & {"--train-iters", "--train-samples"})


def _compared(tree: Path) -> None:
    from megatron import patches

    patches.apply()
    from ft.base.errors import UserError
    from ft.commands.check_line import smallest_world
    from megatron.training.arguments import parse
    from megatron.training.arguments.check import examine
    from megatron.training.config import transformer_config

    ours, asked = {}, {}
    for name, words in lines.lines_of(tree).items():
        try:
            options = parse(words)
            grid, problems = examine(options, smallest_world(options), has_te=True, assumes_machine=True)
            if grid is not None and not problems:
                ours[name] = {key: _plain(value) for key, value in vars(transformer_config(options, grid)).items()}
                asked[name] = {"words": words, "world": grid.world_size}
        except UserError as error:
            print(f"  {name:<100} not built here: {error.problem[:150]}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    told = subprocess.run(
        [sys.executable, str(_REFERENCE)],
        input=json.dumps(asked),
        env=environment,
        cwd=tree,
        capture_output=True,
        check=False,
        text=True,
    )
    if told.returncode:
        sys.exit(told.stderr[-2000:])
    theirs = json.loads(told.stdout.splitlines()[-1])
    fields: Counter[str] = Counter()
    same = 0
    for name, built in ours.items():
        if isinstance(theirs[name], str):
            print(f"  {name:<100} the tree's parser: {theirs[name][:150]}")
            continue
        differ = {key for key in built.keys() & theirs[name].keys() if built[key] != theirs[name][key]}
        fields.update(differ)
        same += not differ
        print(f"  {name:<100} {', '.join(sorted(differ)) or 'equal'}")
    print(f"{same} of {len(ours)} configurations are equal; fields that differ, and in how many lines:")
    for key, count in fields.most_common():
        print(f"  {key} {count}")


def _plain(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return name if name is not None else repr(value)


if __name__ == "__main__":
    sys.exit(main())
