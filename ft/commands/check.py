"""Define the command ``ft check``, which examines a launch line and prints its problems and requirements.

The line is one of this project's trainer or of a Megatron-LM checkout. It is examined without importing torch; the
memory that the largest rank needs on its GPU and on its host is estimated from the flags.
"""

import argparse
import copy
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.hooks import HookFinding
from ft.base.errors import Problem, UserError
from ft.base.flags import groups
from ft.base.quantities import count
from ft.commands import checkouts
from ft.commands.arguments import misplaced
from ft.commands.protection import TRAINER, choose_trainer, is_trainer
from ft.job.agent.options import Script
from ft.lab.plan.snapshot.shards import from_flags, shards
from ft.platform import network, releases
from ft.protection import table
from megatron.ft_trainer.arguments import Options, read
from megatron.ft_trainer.arguments.check import examine
from megatron.ft_trainer.arguments.layout import Layout
from megatron.ft_trainer.arguments.needs import in_words, is_here, may_have_gpu, needs

_VOCABULARIES = {"ByteLevelTokenizer": 259, "GPT2BPETokenizer": 50257, None: 259}
_ANY_VOCABULARY = 128_000


def memory(options: Options, grid: Layout) -> dict[str, Any] | None:
    """Return the estimate for the rank that needs most memory; None if the flags do not determine the size of the
    model.

    Returns:
        ``gpu``: bytes of weights, gradients, optimizer state and activations, and what DMR adds; ``host``: bytes that
        snapshots and peer copies take with --ft-hot-swap; ``sent``: bytes that the rank sends to other nodes in each
        step; ``assumes``: the assumptions of the estimate.
    """
    assumed, assumes = copy.deepcopy(options), "vocabulary as given"
    if not (assumed.tokenizer.vocab_size or assumed.tokenizer.padded_vocab_size):
        assumed.tokenizer.vocab_size = _VOCABULARIES.get(assumed.tokenizer.tokenizer_type, _ANY_VOCABULARY)
        assumes = f"vocabulary of {assumed.tokenizer.vocab_size}"
    try:
        stages = from_flags(assumed, grid)
    except UserError:
        return None
    c = options.core
    width = 2 if c.bf16 or c.fp16 else 4
    snapshots = shards(stages, assumed, grid)
    largest = max(range(grid.pp), key=lambda stage: stages[stage].dense + stages[stage].expert)
    held = stages[largest].dense + stages[largest].expert
    own = snapshots[largest]
    moved = _activations(options, grid)
    peers = options.fault_tolerance.ft_snapshot_peers
    gpu = {
        "weights": width * held,
        "gradients": (4 if c.accumulate_allreduce_grads_in_fp32 else width) * held,
        "optimizer": own.owned + own.replicated - (0 if width == 2 else 4 * held * _share(own, held)),
        "activations": moved,
    }
    gpu["total"] = sum(gpu.values())
    gpu["total_with_double_execution"] = gpu["total"] + width * _widest(options, grid)
    host = {
        "without_protection": 0.0,
        "snapshots_of_hot_swap": 2 * (own.owned + own.replicated),
        "peer_copies_of_hot_swap": 2 * peers * own.owned,
    }
    summed = gpu["gradients"] * (_share(own, held) if c.use_distributed_optimizer else 1)  # its shards, or all of them
    sent = {"snapshots_of_hot_swap": peers * own.owned, "sums_of_two_replicas": summed}
    return {"gpu": gpu, "host": host, "sent": sent, "assumes": assumes}


def _share(own: Any, held: float) -> float:
    """Return the fraction of this rank's parameters whose optimizer state is on this rank."""
    return min(1.0, (own.owned + own.replicated) / (12 * held)) if held else 0.0


def _activations(options: Options, grid: Layout) -> float:
    """Return the bytes of the activations that a rank holds at once (Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models")."""
    c, t = options.core, options.training
    tokens = options.data.seq_length * t.micro_batch_size / grid.cp
    layers = c.num_layers / grid.pp
    if c.recompute_granularity == "full":
        layer = 2.0 * tokens * c.hidden_size
    else:
        split = 34 / grid.tp if c.sequence_parallel else 10 + 24 / grid.tp
        layer = tokens * c.hidden_size * split
        if c.transformer_impl == "local" and c.recompute_granularity is None:
            layer += 5 * c.num_attention_heads * options.data.seq_length * tokens / grid.tp
    in_flight = min(grid.pp, max(1, t.global_batch_size // (t.micro_batch_size * grid.dp)))
    return layer * layers * in_flight * (1 if c.bf16 or c.fp16 else 2)


def _widest(options: Options, grid: Layout) -> float:
    """Return the number of elements of the largest operator result that double execution stores a second time."""
    c, t = options.core, options.training
    tokens = options.data.seq_length * t.micro_batch_size / grid.cp
    return tokens * max(c.ffn_hidden_size * (2 if c.swiglu else 1), c.hidden_size * 4) / grid.tp


_FLAG = re.compile(r"--[a-zA-Z][\w-]*")


@dataclass
class CheckResult:
    """The result of ``ft check`` for one launch line.

    Attributes:
        program: "trainer" or "checkout" (of Megatron-LM).
        refused: the problems, each with ``flag``, ``reason`` and ``fix``.
        needs: what the line requires of the machine that runs it: "GPU", "transformer-engine", names of packages.
        missing: those of ``needs`` that this machine does not have; empty if the question is about another machine.
        layout: sizes of the parallel groups; None if they cannot be determined.
        batch: sizes of the batch; None if they cannot be determined.
        memory: bytes per GPU, see :func:`ft.commands.check.memory`; None if they cannot be estimated.
        protections: for each protection, whether it can be added to this line, and the problems that prevent it.
        notices: sentences about flags that have no effect in this project's trainer.
        known_faults: sentences about known faults of the releases of NCCL, torch, Transformer Engine and the driver
            that are installed here; empty if the question is about another machine.
        networks: name of a network interface of this machine -> its rate in Gb/s, None if that is not known; empty if
            the question is about another machine.
        hooks: for a checkout, each function of its trainer that protections depend on: ``file``, ``symbol``, ``status``
            ("fits", "missing" or "changed"), ``differs`` and ``why``. Only runs with ``--ft-*`` flags
            depend on these functions.
    """

    program: str
    refused: list[dict[str, str]] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    layout: dict[str, int] | None = None
    batch: dict[str, int] | None = None
    memory: dict[str, Any] | None = None
    protections: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    known_faults: list[str] = field(default_factory=list)
    networks: dict[str, float | None] = field(default_factory=dict)
    hooks: list[dict[str, str]] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return not self.refused and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        return {"accepted": self.accepted, **asdict(self)}


def answer_for(script: Path, words: list[str], gpus: int | None) -> CheckResult:
    """Examine a launch line.

    Args:
        gpus: number of GPUs of a machine that has all that the line needs; None: the question is about this machine,
            and the fewest GPUs that the layout needs.

    Raises:
        UserError: the script is neither this project's trainer nor that of a Megatron-LM checkout.
    """
    given = Script(str(script), False, words)
    program = program_of(given)
    has_te = gpus or may_have_gpu() or given.target != str(tree.SCRIPT)
    defaults = ["--transformer-impl", "transformer_engine"] if program == "checkout" and has_te else []
    options, problems, doubtful = read([*defaults, *words], guesses=program == "trainer")
    pattern = _layer_pattern(words) if program == "checkout" else None
    problems = [misplaced(problem) or (problem, fix) for problem, fix in problems]
    answer = CheckResult(program)
    world = None if options is None else gpus or smallest_world(options)
    of_files: list[Problem] = []
    if program == "checkout":
        own = checkouts.parsers_flags(given)
        problems = [entry for entry in problems if _flag_of(*entry) not in own and not entry[0].startswith("--ft-")]
        findings, of_files = checkouts.examine_files(given.target)
        answer.hooks = [_described(finding) for finding in findings]
        if checkouts.is_protected_checkout(given):
            problems += [*of_files, *checkouts.examine_flags(given, world, 0)[1]]
    if options is not None:
        grid, found = examine(
            options, world, has_te=True, has_gpu=True, shapes_are_known=not doubtful, assumes_machine=True
        )
        problems += [
            entry
            for entry in found
            if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))
            and (program == "trainer" or not _is_limit_of_trainer(entry))
        ]
        of_model = checkouts.needs_of_model(given, pattern) if program == "checkout" else []
        answer.needs = in_words([*needs(options, grid), *of_model])
        answer.missing = [] if gpus else [name for name in answer.needs if not is_here(name)]
        answer.notices = list(options.notices)
        if program == "checkout":
            answer.notices = [] if of_files else checkouts.notices(given.target)
        if grid is not None:
            _describe(answer, options, grid)
            answer.memory = None if pattern else answer.memory
            of_checkout = (given, of_files) if program == "checkout" else None
            answer.protections = _protections(options, grid, of_checkout)
    answer.refused = _as_dicts(dict.fromkeys(problems))
    answer.networks = {} if gpus else {name: network.rate_gbps(name) for name in network.interfaces() if name != "lo"}
    answer.known_faults = [] if gpus else releases.known_faults(releases.installed())
    return answer


def _layer_pattern(words: list[str]) -> str | None:
    """Return the kinds of layers of a hybrid model of Mamba, attention and MLP layers; None for a GPT."""
    flags = "--hybrid-layer-pattern", "--hybrid-override-pattern"
    found = [group for group in groups(words) if group[0].partition("=")[0] in flags]
    return " ".join([found[-1][0].partition("=")[2], *found[-1][1:]]).strip() if found else None


def program_of(script: Script) -> str:
    """Return "trainer" for this project's trainer, and "checkout" for a script of a Megatron-LM checkout.

    A missing file with the name of the trainer counts as the trainer.

    Raises:
        UserError: the script is neither.
    """
    file = Path(script.target)
    if is_trainer(script) or (not file.is_file() and file.name == TRAINER.name):
        return "trainer"
    if not file.is_file():
        raise UserError(f"there is no script {file}", "give the path of pretrain_gpt.py")
    if checkouts.is_checkout(script):
        return "checkout"
    if (below := checkouts.below_a_checkout(file)) is not None:
        raise UserError(*below)
    raise UserError(
        f"{file} is neither this project's pretrain_gpt.py nor a script of a Megatron-LM checkout (no "
        "megatron/training/training.py beside it)",
        "give one of these",
    )


def smallest_world(options: Options) -> int:
    """Return the smallest number of GPUs that the layout of the flags needs."""
    c = options.core
    tp, pp, cp = c.tensor_model_parallel_size, c.pipeline_model_parallel_size, c.context_parallel_size
    experts = (c.expert_tensor_parallel_size or tp) * c.expert_model_parallel_size * pp
    return math.lcm(tp * pp * cp, experts) * c.num_distributed_optimizer_instances


def _described(finding: HookFinding) -> dict[str, str]:
    hook = finding.hook
    found = {"status": finding.status, "differs": finding.differs}
    return {"file": hook.file, "symbol": hook.symbol, **found, "why": hook.why}


def _describe(answer: CheckResult, options: Options, grid: Layout) -> None:
    """Fill in the sizes of ``answer``: layout, batch and memory."""
    answer.layout = {name: size for name, size in asdict(grid).items() if size is not None}
    t = options.training
    answer.batch = {
        "micro_batch": t.micro_batch_size,
        "global_batch": t.global_batch_size,
        "microbatches": t.global_batch_size // (t.micro_batch_size * grid.dp),
        "sequence_length": options.data.seq_length,
    }
    answer.memory = memory(options, grid)


_ENABLED_BY: dict[str, dict[str, Any]] = {
    table.HOT_SWAP: {"ft_hot_swap": True},
    table.STAGES: {"ft_hot_swap": True, "ft_checkfree": True},
    table.SWAPPED: {"ft_hot_swap": True, "ft_checkfree": True, "ft_checkfree_plus": True},
    table.DOUBLE: {"ft_dmr": "piggyback"},
}
"""Name of a protection -> values of the flags that enable it and the protections that it requires.
Protections that ``ft run`` enables (replicas, stacked shards) are not in it."""

_REPLICAS = {table.REPLICAS: 2, table.STACKS: 2}
"""Name of a protection -> the number of replicas with which it is tried."""


def _protections(
    options: Options, grid: Layout, of_checkout: tuple[Script, list[Problem]] | None
) -> list[dict[str, Any]]:
    """Return whether each protection could be added to this launch line: the value of ``CheckResult.protections``.

    Args:
        of_checkout: the script of a checkout and the problems of the checkout's files; None for this project's trainer.
    """
    entries = [entry for entry in table.TABLE if entry.name != table.PROFILE]
    if of_checkout is None:
        _, before = examine(copy.deepcopy(options), grid.world_size, has_te=True, assumes_machine=True)
        found = [[each for each in _with(entry, options, grid) if each not in before] for entry in entries]
    else:
        script, of_files = of_checkout
        found = [[*of_files, *_with_in_checkout(entry, script, grid)] for entry in entries]
    return [
        {"name": entry.name, "asked_by": entry.asked_by, "fits": not problems, "needs": _as_dicts(problems)}
        for entry, problems in zip(entries, found, strict=True)
    ]


def _with(entry: table.ProtectionEntry, options: Options, grid: Layout) -> list[Problem]:
    """Return the problems of a line of this project's trainer with a protection added."""
    asked = copy.deepcopy(options)
    for name, value in _ENABLED_BY.get(entry.name, {}).items():
        setattr(asked.fault_tolerance, name, value)
    replicas = _REPLICAS.get(entry.name, 0)
    return examine(asked, grid.world_size, has_te=True, replicas=replicas, assumes_machine=True)[1]


def _with_in_checkout(entry: table.ProtectionEntry, script: Script, grid: Layout) -> list[Problem]:
    """Return the problems of the flags of a checkout's trainer with a protection added, and no other protection."""
    flags = [
        word
        for name, value in _ENABLED_BY.get(entry.name, {}).items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [value]))
    ]
    asking = replace(script, args=[*checkouts.flags_of_trainer(script), *flags])
    return checkouts.examine_flags(asking, grid.world_size, _REPLICAS.get(entry.name, 0))[1]


def _as_dicts(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"flag": _flag_of(*each), "reason": each[0], "fix": each[1] or ""} for each in problems]


def _is_limit_of_trainer(problem: Problem) -> bool:
    """Return whether only this project's trainer has this problem: its text says "this trainer", or names a protection,
    which :func:`ft.commands.checkouts.examine` judges for a checkout."""
    return "this trainer" in problem[0] or "--ft-" in problem[0]


def _flag_of(problem: str, fix: str | None) -> str:
    """Return the flag that causes a problem: the first flag in the problem's text or, if there is none, in that of its
    fix.
    """
    found = _FLAG.findall(problem) or _FLAG.findall(fix or "")
    return found[0] if found else ""


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


def _text(answer: CheckResult) -> str:
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
    if answer.hooks:  # the functions of a Megatron-LM checkout that protections depend on
        changed = [each for each in answer.hooks if each["differs"]]
        fitting = len(answer.hooks) - len(changed)
        lines.append(f"checkout: {fitting} of {len(answer.hooks)} functions that protections depend on are as expected")
        lines += [f"  {each['file']}: {each['symbol']} {each['differs']}; {each['why']}" for each in changed]
    lines += _networks(answer)
    lines += [f"known fault: {fault}" for fault in answer.known_faults]
    return "\n".join([*lines, *answer.notices])


def _verdict(answer: CheckResult) -> str:
    if answer.refused:
        return f"refused: {len(answer.refused)} problem(s)"
    if answer.missing:
        return f"not here: needs {', '.join(answer.missing)}; --gpus N asks about a run on N GPUs elsewhere"
    return "accepted" + (f" on machines that have: {', '.join(answer.needs)}" if answer.needs else "")


def _networks(answer: CheckResult) -> list[str]:
    """Return lines about what protections send from each GPU in a step, how long that takes over each of this machine's
    interfaces, and which of them it takes.
    """
    if answer.memory is None:
        return []
    snapshots, sums = (size / 1e9 for size in answer.memory["sent"].values())
    lines = [
        f"network: in each step a GPU sends {snapshots:.2f} GB of snapshots with --ft-hot-swap, and {sums:.2f} GB of "
        "gradients with two replicas (up to twice that with more)"
    ]
    for name, rate in answer.networks.items():
        takes = "" if rate is None else f": {8 * snapshots / rate:.2f} s and {8 * sums / rate:.2f} s, alone on it"
        lines.append(f"  {network.said_rate(name)}{takes}")
    if not answer.networks:
        return lines
    fastest = network.bulk_interface(os.environ)[0]
    usual = f"{fastest}, which NCCL_SOCKET_IFNAME names" if fastest else "that of the control messages"
    return [
        *lines,
        "  control messages take the interface that leads to node 0, or that of ft run --local-addr; snapshots and "
        f"gradients take {usual}, or that of --data-interface; training waits for what takes longer than a step",
    ]


def _memory(answer: CheckResult) -> list[str]:
    if answer.memory is None:
        return []
    lines = [f"memory per GPU, estimated ({answer.memory['assumes']}):"]
    for place in ("gpu", "host"):
        for name, size in answer.memory[place].items():
            lines.append(f"  {place}, {name.replace('_', ' ')}: {size / 1e9:.2f} GB")
    return lines
