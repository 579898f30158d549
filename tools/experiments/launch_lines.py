"""Which launch lines of NVIDIA's functional tests the trainer takes, and which of them it trains as NVIDIA's tree does.

    python tools/experiments/launch_lines.py
    python tools/experiments/launch_lines.py --train FOLDER
    python tools/experiments/launch_lines.py --report FOLDER

The trees are those of ``MEGATRON_LM_TREES``, or ``../shared/megatron_lm``. Each line is read and checked as by
``ft check``, with the flags of the megatron-core that is installed. The table in ``results`` has a run with the oldest
supported release and one with the newest.

With ``--train``, the accepted lines of the tree of the installed release are scaled down
(``launch_lines_scale.py``) and trained on this machine's CPU by this project's trainer and by NVIDIA's, on the same
data; losses and gradient norms are compared bit for bit (``launch_lines_train.py``). A run that NVIDIA's trainer cannot
resume is compared with its run without the resume. FOLDER keeps the results; a line with a result is not trained
again. ``--report`` prints the table of all lines from it.
"""

import argparse
import fnmatch
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import launch_lines as lines  # noqa: E402
import launch_lines_scale as scaling  # noqa: E402
from launch_lines_train import Case, Trainers, cannot_resume, verdict  # noqa: E402

from ft.commands.check import answer_for, smallest_world  # noqa: E402
from megatron.ft_trainer.arguments import read  # noqa: E402
from megatron.ft_trainer.arguments.check import examine  # noqa: E402
from megatron.ft_trainer.arguments.known import without_effect  # noqa: E402
from megatron.ft_trainer.arguments.needs import needs  # noqa: E402

_GENERATION = "the flags of text generation have no effect on training"

WHY = {
    "--fim-data": "fill-in-the-middle samples are drawn per sample here, so that a standby reads the same ones",
}
"""A flag with which the two trainers cannot be equal -> the reason."""

WHY_FAILED = {
    "len(steps) == 1": "without Transformer Engine or Apex, a distributed optimizer of megatron-core that has made no "
    "step yet cannot load a checkpoint; this project's trainer can",
    "argument 'strides'": "checkpoints of this torch name the strides of tensors, which this megatron-core hands to "
    "torch.empty; this project's trainer leaves them out",
    "out of time": "with --overlap-p2p-communication-warmup-flush, an evaluation of megatron-core 0.16.1 does not end "
    "over gloo; that of 0.19.2 does",
    "KeyError: Float16Module": "with --overlap-param-gather the tree removes hooks before an evaluation that it adds "
    "after the first update, and with fp16 the updates until then were skipped",
}
"""Text of a failure of NVIDIA's tree, or of both trainers -> the reason."""


@dataclass
class Line:
    """A launch line: its verdict (accepted, refused, another program), with the reasons for a refusal."""

    name: str
    words: list[str]
    verdict: str
    reasons: list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="train the accepted lines, results into FOLDER")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="print the table from the results in FOLDER")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default 20)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="train only tests of these names")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds that one run may take (default 300)")
    parser.add_argument("--until-s", type=float, default=1e9, help="begin no further line after so many seconds")
    options = parser.parse_args()
    for tree in lines.trees():
        if options.train or options.report:
            if tree.name.startswith("core_v" + ".".join(version("megatron-core").split(".")[:2])):
                _compare(tree, options)
            continue
        print(f"== lines of {tree.name}, checked with megatron-core {version('megatron-core')}")
        _accepted(lines.lines_of(tree))
    return 0


def _examined(found: dict[str, list[str]]) -> list[Line]:
    result = []
    for name, words in found.items():
        answer = answer_for(ROOT / "pretrain_gpt.py", words, None)
        reasons = list(dict.fromkeys(entry["reason"] for entry in answer.refused))
        word = "another program" if _is_other_program(words) else "accepted" if answer.accepted else "refused"
        result.append(Line(name, words, word, reasons))
    return result


def _accepted(found: dict[str, list[str]]) -> None:
    examined = _examined(found)
    parsed = sum(not read(words)[1] for words in found.values())
    training = [line for line in examined if line.verdict != "another program"]
    accepted = sum(line.verdict == "accepted" for line in training)
    why = Counter(reason for line in training for reason in line.reasons)
    print(f"parsed {parsed} of {len(found)} ({parsed / len(found):.1%})")
    print(f"accepted {accepted} of the {len(training)} that train ({accepted / len(training):.1%})")
    print("why lines that train are refused (a line can have several reasons):")
    print("\n".join(f"  {count:>3}  {reason}" for reason, count in why.most_common()))
    print("all lines:")
    for line in examined:
        print(f"  {line.verdict:<16} {line.name}" + f" ({'; '.join(line.reasons)})" * (line.verdict == "refused"))


def _is_other_program(words: list[str]) -> bool:
    """Return whether a line is of another program: reinforcement learning, ModelOpt, Flextron, or text generation."""
    flags = {word for word in words if word.startswith("--")}
    rl = any(flag.startswith(("--rl-", "--grpo-", "--export-")) or flag in ("--flextron",) for flag in flags)
    generates = any(without_effect(flag) == _GENERATION for flag in flags)
    return rl or (generates and not flags & {"--train-iters", "--train-samples"})


def _compare(tree: Path, options: argparse.Namespace) -> None:
    examined = [line for line in _examined(lines.lines_of(tree)) if line.verdict != "another program"]
    cases, essential = _cases(tree, examined, options.steps)
    into = (options.train or options.report) / tree.name
    into.mkdir(parents=True, exist_ok=True)
    if options.train:
        _train(tree, into, cases, options)
    if options.report:
        _report(tree, into, examined, cases, essential)


def _cases(tree: Path, examined: list[Line], steps: int) -> tuple[list[Case], dict[str, str]]:
    """Return (the different scaled lines, name of a line that only a GPU can train -> what it needs)."""
    cases: dict[str, Case] = {}
    essential = {}
    resuming = lines.resuming(tree)
    for line in examined:
        if line.verdict != "accepted":
            continue
        options = read(line.words)[0]
        grid, _ = examine(options, smallest_world(options), has_te=True, has_gpu=True, assumes_machine=True)
        if found := scaling.needs_gpu(needs(options, grid)):
            essential[line.name] = ", ".join(found)
            continue
        scaled = scaling.scale(line.words, steps, resumes=line.name in resuming)
        case = Case(scaled.flags, scaled.ranks, line.name in resuming)
        cases.setdefault(case.key, case).names[line.name] = scaled.lacks
    mixed = sorted(cases.values(), key=lambda case: (case.resumes, case.key))  # the first of them are of all kinds
    return mixed, essential


def _train(tree: Path, into: Path, cases: list[Case], options: argparse.Namespace) -> None:
    until = time.monotonic() + options.until_s
    trainers = Trainers(tree, into, options.limit_s)
    wanted = [(name, pattern) for pattern in options.only for case in cases for name in case.names]
    names = {name for name, pattern in wanted if fnmatch.fnmatch(name, pattern)}
    chosen = [case for case in cases if names & case.names.keys()]
    for index, case in enumerate(chosen, 1):
        file = into / f"{case.key}.json"
        result = json.loads(file.read_text()) if file.exists() else {}
        if time.monotonic() > until or (result and ("whole" in result or not cannot_resume(result))):
            continue
        result = result or trainers.train(case, options.steps)
        if cannot_resume(result):
            result["whole"] = trainers.train_whole(case, options.steps)
        file.write_text(json.dumps(result, indent=1) + "\n")
        word, reason = verdict(result)
        print(f"{index}/{len(chosen)} {next(iter(case.names))} ({case.key}): {word} ({reason})", flush=True)
    trainers.close()


def _report(tree: Path, into: Path, examined: list[Line], cases: list[Case], essential: dict[str, str]) -> None:
    rows = {}
    for line in examined:
        if line.verdict == "refused":
            rows[line.name] = ("refused", "; ".join(line.reasons))
    rows |= {name: ("needs a GPU", what) for name, what in essential.items()}
    for case in cases:
        file = into / f"{case.key}.json"
        for name, lacks in case.names.items():
            word, reason = verdict(json.loads(file.read_text())) if file.exists() else ("not trained", "")
            if word == "differs" and (known := [why for flag, why in WHY.items() if flag in case.flags]):
                reason += f": {known[0]}"
            if word in ("theirs fails", "ours resumes") and (
                known := [why for text, why in WHY_FAILED.items() if text in reason]
            ):
                reason += f"; {known[0]}"
            reason += " with a resume in the middle" * (word == "equal" and case.resumes)
            lacking = f"without {', '.join(lacks)}" if lacks else ""
            rows[name] = (word, "; ".join(filter(None, (f"{case.ranks} ranks", reason, lacking))))
    trained = sum((into / f"{case.key}.json").exists() for case in cases)
    print(f"== lines of {tree.name}, trained with megatron-core {version('megatron-core')} and by the tree itself")
    print(f"{len(rows)} lines that train; {len(cases)} different ones when scaled down, {trained} of them trained")
    for word, count in Counter(word for word, _ in rows.values()).most_common():
        print(f"  {count:>3}  {word}")
    print("all lines that train:")
    for name, (word, reason) in sorted(rows.items()):
        print(f"  {word:<12} {name} ({reason})")


if __name__ == "__main__":
    sys.exit(main())
