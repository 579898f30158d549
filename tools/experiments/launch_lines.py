"""Which launch lines of NVIDIA's functional tests the trainer takes, and why not the others.

    python tools/experiments/launch_lines.py

The trees are those of ``MEGATRON_LM_TREES``, or ``../shared/megatron_lm``. Each line is read and checked as by
``ft check``, with the flags of the megatron-core that is installed. The table in ``results`` has a run with the oldest
supported release and one with the newest.
"""

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import launch_lines as lines  # noqa: E402

from ft.commands.check_line import answer_for  # noqa: E402
from megatron.training.arguments import read  # noqa: E402
from megatron.training.arguments.known import without_effect  # noqa: E402

_GENERATION = "the flags of text generation have no effect on training"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    for tree in lines.trees():
        print(f"== lines of {tree.name}, checked with megatron-core {version('megatron-core')}")
        _accepted(lines.lines_of(tree))
    return 0


def _accepted(found: dict[str, list[str]]) -> None:
    parsed = trained = others = 0
    why: Counter[str] = Counter()
    rows = []
    for name, words in found.items():
        parsed += not read(words)[1]
        answer = answer_for(ROOT / "pretrain_gpt.py", words, None)
        other = _is_other_program(words)
        others += other
        trained += answer.accepted and not other
        reasons = list(dict.fromkeys(entry["reason"] for entry in answer.refused))
        why.update(reasons if not other else [])
        verdict = "another program" if other else "accepted" if answer.accepted else "refused"
        rows.append(f"  {verdict:<16} {name}" + (f" ({'; '.join(reasons)})" if verdict == "refused" else ""))
    training = len(found) - others
    print(f"parsed {parsed} of {len(found)} ({parsed / len(found):.1%})")
    print(f"accepted {trained} of the {training} that train ({trained / training:.1%})")
    print("why lines that train are refused (a line can have several reasons):")
    print("\n".join(f"  {count:>3}  {reason}" for reason, count in why.most_common()))
    print("all lines:")
    print("\n".join(rows))


def _is_other_program(words: list[str]) -> bool:
    """Return whether a line is of another program: reinforcement learning, ModelOpt, Flextron, or text generation."""
    flags = {word for word in words if word.startswith("--")}
    rl = any(flag.startswith(("--rl-", "--grpo-", "--export-")) or flag in ("--flextron",) for flag in flags)
    generates = any(without_effect(flag) == _GENERATION for flag in flags)
    return rl or (generates and not flags & {"--train-iters", "--train-samples"})


if __name__ == "__main__":
    sys.exit(main())
