"""Scales a launch line of NVIDIA's functional tests down to a few CPU processes, by one rule for all lines.

The rule keeps what decides how a model is built and cut, and the ratios of its sizes:

- TP, PP, EP and expert TP are kept while the smallest world has at most ``RANKS`` ranks; otherwise the largest of them
  is halved until it does. Where data parallelism would be 1, the world is doubled if it still has at most that many.
- Query heads and groups are divided by their largest common divisor that leaves at least 4 heads (and TP groups), and
  a head has 8 channels. The hidden size, the MLPs and the latent ranks shrink with heads and channels.
- Layers keep the number of model chunks, with at most two layers in a chunk. Where a pattern or a layout lists the
  layers, their number is kept.
- More than 16 experts become 16; top-k and the routing groups are divided by the same number.
- Sequences have 32 tokens. A step has as many microbatches of two samples as the pipeline has stages, at least two.
"""

import fnmatch
import math
from dataclasses import dataclass, field

from megatron.ft_trainer.arguments.needs import Need

RANKS = 4
VOCABULARY = 257
SEQUENCE, CHANNELS, HEADS, EXPERTS, MICRO_BATCH = 32, 8, 4, 16, 2

LEFT_OUT = {
    "needs a kernel of Transformer Engine or of a GPU, which computes the same": {
        "--moe-grouped-gemm": "grouped GEMM",
        "--moe-permute-fusion": "fused permutation",
        "--moe-router-fusion": "fused router",
        "--use-flash-attn": "flash attention",
        "--attention-backend": "",
        "--cp-comm-type": "",
        "--hierarchical-context-parallel-sizes": "",
        "--context-parallel-size": "context parallelism",
        "--te-rng-tracker": "the random numbers of Transformer Engine",
        "--tp-comm-overlap": "overlapped TP communication",
        "--tp-comm-overlap-cfg": "",
        "--delay-wgrad-compute": "delayed weight gradients",
        "--overlap-moe-expert-parallel-comm": "overlapped expert communication",
        "--cuda-graph-impl": "CUDA graphs",
        "--cuda-graph-scope": "",
        "--cuda-graph-modules": "",
        "--cuda-graph-warmup-steps": "",
        "--external-cuda-graph": "CUDA graphs",
        "--fine-grained-activation-offloading": "activation offloading",
        "--offload-modules": "",
        "--moe-flex-dispatcher-backend": "",
        "--moe-enable-deepep": "DeepEP",
        "--use-transformer-engine-op-fuser": "the operator fuser of Transformer Engine",
        "--defer-embedding-wgrad-compute": "deferred weight gradients of the embedding",
        "--wgrad-deferral-limit": "",
        "--apply-layernorm-1p": "zero-centred norm weights",
    },
    "says where the run reads and writes, or what it logs": (
        *("--data-path", "--mock-data", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-model"),
        *("--tokenizer-type", "--legacy-tokenizer", "--vocab-size", "--save", "--load", "--save-interval"),
        *("--save-retain-interval", "--tensorboard-dir", "--log-interval", "--log-memory-to-tensorboard"),
        *("--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--log-throughput", "--logging-level"),
        *("--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir", "--timing-log-level"),
        *("--make-vocab-size-divisible-by", "--distributed-timeout-minutes", "--exit-interval"),
        *("--exit-duration-in-mins", "--no-load-optim", "--finetune", "--use-mcore-models"),
    ),
    "says how a checkpoint is written; the processes of a save would import everything again": (
        *("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "--async-ckpt-use-cpu-shm"),
        *("--ckpt-assume-constant-structure",),
    ),
    "injects errors into NVIDIA's own rerun machine": ("--error-injection-rate", "--error-injection-type"),
    "a CPU has no such kernel, and --transformer-impl local does not use it": (
        *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
        *("--no-rope-fusion", "--transformer-impl", "--distributed-backend"),
    ),
}
"""Reason why flags are left out for both trainers -> the flags. Where a flag has a text, it names what the scaled line
therefore lacks; flags with an empty text only configure a feature that another flag names."""

OF_CHECKPOINTS = (
    *("--*ckpt-*", "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler", "--verify-integrity"),
)
"""Flags without effect on a run that neither saves nor loads."""

CPU = (
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--no-gradient-accumulation-fusion"),
    *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
)
_OF_TE = ("layernorm", "moe_act", "mla_up_proj")
"""Modules that only Transformer Engine can recompute."""
_REPLACED = ("--transformer-impl", "--distributed-backend", "--window-size", "--wandb-project", "--tokenizer-type")


@dataclass
class Scaled:
    """A line that a CPU can train.

    Attributes:
        flags: the flags of the scaled line, for both trainers, without data, tokenizer and folders.
        ranks: number of processes.
        lacks: names of the original line's features that this line lacks.
        batch: number of samples of the first step.
    """

    flags: list[str]
    ranks: int
    lacks: list[str]
    batch: int


@dataclass
class _Line:
    """A launch line: its flags with their values, and the names of features that were left out of it."""

    flags: dict[str, list[str]]
    lacks: list[str] = field(default_factory=list)

    def number(self, flag: str, default: int) -> int:
        return int(float(self.flags[flag][0])) if self.flags.get(flag) else default

    def put(self, flag: str, value: object) -> None:
        """Give ``flag`` a value, if the line has it."""
        if flag in self.flags:
            self.flags[flag] = [str(value)]


def needs_gpu(needs: list[Need]) -> list[str]:
    """Return the requirements of a line that scaling does not remove, so that it cannot be trained on a CPU.

    Args:
        needs: all requirements of the original line.

    Returns:
        "flag (requirement)" for each; an empty list if a CPU can train the scaled line.
    """
    left_out = _names_of_left_out()
    found = []
    for need in needs:
        flag = need.flag.split()[0]
        if flag in left_out or flag in _REPLACED or flag in ("--recompute-modules", "--cross-entropy-fusion-impl"):
            continue
        if need.flag == "--moe-token-dispatcher-type flex":
            continue
        found.append(f"{need.flag} ({need.requirement})")
    return found


def scale(words: list[str], steps: int, *, resumes: bool = False) -> Scaled:
    """Return the line scaled down to ``steps`` steps. Flags of checkpoints are kept only if the run ``resumes``."""
    line = _Line(_grouped(words))
    _leave_out(line)
    for flag in list(line.flags):
        if not resumes and any(fnmatch.fnmatchcase(flag, one) for one in OF_CHECKPOINTS):
            line.flags.pop(flag)
    _recomputation(line)
    ranks = _layout(line)
    _layers(line, _grouped(words))
    _experts(line)
    _widths(line)
    batch = _batch(line, ranks, steps)
    ordered = [word for flag in sorted(line.flags) for word in (flag, *line.flags[flag])]
    return Scaled([*ordered, *CPU], ranks, line.lacks, batch)


def _names_of_left_out() -> set[str]:
    return {flag for flags in LEFT_OUT.values() for flag in flags}


def _grouped(words: list[str]) -> dict[str, list[str]]:
    """Return flag -> values; a list in brackets becomes several values."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
        elif word.startswith("[") and " " in word:
            values += word.strip("[]").split()
        elif _is_list_of_one(word):
            values.append(word.strip("[]"))
        else:
            values.append(word)
    return found


def _is_list_of_one(word: str) -> bool:
    """Return whether a word is a list of one entry in brackets, such as ``[moe_act]``."""
    return word.startswith("[") and word.endswith("]") and word[1:-1].isidentifier()


def _leave_out(line: _Line) -> None:
    kernels = next(iter(LEFT_OUT.values()))
    if line.number("--context-parallel-size", 1) == 1:
        line.flags.pop("--context-parallel-size", None)
    if line.flags.get("--cuda-graph-impl") == ["none"]:
        line.flags.pop("--cuda-graph-impl")
    for flag in _names_of_left_out() & set(line.flags):
        line.flags.pop(flag)
        if lacking := kernels.get(flag):
            line.lacks.append(lacking)
    if line.flags.get("--moe-token-dispatcher-type") == ["flex"]:
        line.put("--moe-token-dispatcher-type", "alltoall")
        line.lacks.append("the flex dispatcher (alltoall instead)")
    if line.flags.get("--cross-entropy-fusion-impl") == ["te"]:
        line.put("--cross-entropy-fusion-impl", "native")
        line.lacks.append("the cross entropy of Transformer Engine (native instead)")
    line.lacks.sort()


def _recomputation(line: _Line) -> None:
    """Leave out the modules that only Transformer Engine recomputes."""
    modules = line.flags.get("--recompute-modules")
    if modules is None:
        return
    kept = [name for name in modules if name not in _OF_TE]
    line.lacks.append(f"recomputation of {', '.join(name for name in modules if name in _OF_TE)}")
    if kept:
        line.flags["--recompute-modules"] = kept
    else:
        for flag in ("--recompute-modules", "--recompute-granularity"):
            line.flags.pop(flag, None)


def _layout(line: _Line) -> int:
    """Reduce the parallel sizes until the smallest world has at most ``RANKS`` ranks; return the number of ranks."""
    tp, pp, ep, etp = (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
    )
    instances = line.number("--num-distributed-optimizer-instances", 1)

    def smallest() -> int:
        dense = line.number(tp, 1) * line.number(pp, 1)
        experts = line.number(etp, line.number(tp, 1)) * line.number(ep, 1) * line.number(pp, 1)
        return math.lcm(dense, experts) * instances

    chunks = _chunks(line)
    while smallest() > RANKS:
        largest = max((ep, pp, tp, etp), key=lambda flag: line.number(flag, 1))
        line.put(largest, line.number(largest, 1) // 2)
    line.flags["_chunks"] = [str(chunks)]
    ranks = smallest()
    is_alone = ranks == line.number(tp, 1) * line.number(pp, 1)
    return ranks * 2 if is_alone and ranks * 2 <= RANKS else ranks


def _chunks(line: _Line) -> int:
    """Return the number of model chunks on a rank."""
    stages, layers = line.number("--pipeline-model-parallel-size", 1), line.number("--num-layers", 1)
    if each := line.number("--num-layers-per-virtual-pipeline-stage", 0):
        return max(1, layers // stages // each)
    return line.number("--num-virtual-stages-per-pipeline-rank", 1)


_LIST_LAYERS = (
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)


def _layers(line: _Line, original: dict[str, list[str]]) -> None:
    (chunks,) = map(int, line.flags.pop("_chunks"))
    has_pattern = not line.flags.get("--moe-layer-freq", ["1"])[0].isdigit()
    if has_pattern or any(flag in line.flags for flag in _LIST_LAYERS):
        return
    stages, layers = line.number("--pipeline-model-parallel-size", 1), line.number("--num-layers", 1)
    before = int(original.get("--pipeline-model-parallel-size", ["1"])[0])
    each = min(2, max(1, layers // before // chunks))
    if "--num-layers-per-virtual-pipeline-stage" in line.flags:
        each = 1
        line.put("--num-layers-per-virtual-pipeline-stage", each)
    line.put("--num-layers", stages * chunks * each)


def _experts(line: _Line) -> None:
    experts, most = line.number("--num-experts", 0), EXPERTS
    if experts <= most:
        return
    by = experts // most
    for flag in ("--num-experts", "--moe-router-topk", "--moe-router-num-groups", "--moe-router-group-topk"):
        line.put(flag, max(1, line.number(flag, 1) // by))


def _widths(line: _Line) -> None:
    tp, heads = line.number("--tensor-model-parallel-size", 1), line.number("--num-attention-heads", 1)
    hidden = line.number("--hidden-size", 1)
    groups = line.number("--num-query-groups", heads) if "--group-query-attention" in line.flags else heads
    channels = line.number("--kv-channels", hidden // heads)
    by = max(
        each
        for each in range(1, groups + 1)
        if heads % each == groups % each == 0 and heads // each >= HEADS and (groups // each) % tp == 0
    )
    narrower = channels / CHANNELS
    shrink = by * narrower
    line.put("--num-attention-heads", heads // by)
    line.put("--num-query-groups", groups // by)
    line.put("--hidden-size", round(hidden / shrink))
    line.put("--kv-channels", CHANNELS)
    of_model = ("--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
    for flag in (*of_model, "--q-lora-rank", "--kv-lora-rank", "--mup-base-hidden-size"):
        least = 8 * tp
        line.put(flag, max(least, round(line.number(flag, 1) / shrink / least) * least))
    for flag in ("--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"):
        line.put(flag, max(2, round(line.number(flag, 1) / narrower)))


def _batch(line: _Line, ranks: int, steps: int) -> int:
    """Set sequences, batch, schedules and the length of the run; return the number of samples of the first step."""
    shorter = line.number("--seq-length", SEQUENCE) // SEQUENCE
    line.put("--seq-length", SEQUENCE)
    line.put("--max-position-embeddings", line.number("--max-position-embeddings", SEQUENCE) // shorter)
    tp, pp = line.number("--tensor-model-parallel-size", 1), line.number("--pipeline-model-parallel-size", 1)
    micro = min(MICRO_BATCH, line.number("--micro-batch-size", 1))
    group = line.number("--microbatch-group-size-per-virtual-pipeline-stage", 1)
    batch = micro * (ranks // tp // pp) * max(2, pp, group)
    line.put("--micro-batch-size", micro)
    most, samples = _growing(line, batch, steps) or (batch, batch * steps)
    line.put("--global-batch-size", most)
    line.put("--eval-global-batch-size", most)
    line.put("--train-iters", steps)
    line.put("--train-samples", samples)
    line.put("--lr-decay-iters", steps)
    decay, warmup = line.number("--lr-decay-samples", 1), line.number("--lr-warmup-samples", 0)
    line.put("--lr-warmup-samples", warmup * samples // decay)
    line.put("--lr-decay-samples", samples)
    line.put("--eval-interval", max(1, steps // 2))
    line.put("--eval-iters", min(1, line.number("--eval-iters", 1)))
    line.put("--check-weight-hash-across-dp-replicas-interval", max(1, steps // 2))
    return batch


def _growing(line: _Line, batch: int, steps: int) -> tuple[int, int] | None:
    """Scale a batch size that grows from ``batch`` to its triple; return (last batch size, samples of all steps).

    Return None if the line has a constant batch size.
    """
    once, twice = steps // 10 * 2, steps // 10
    thrice = steps - once - twice
    if "--step-batch-size-schedule" in line.flags:
        first, second = (batch * count * SEQUENCE for count in (once, once + 2 * twice))
        line.put("--step-batch-size-schedule", f"0:{batch} {first}:{2 * batch} {second}:{3 * batch}")
    elif "--rampup-batch-size" in line.flags:
        line.flags["--rampup-batch-size"] = [str(batch), str(batch), str(batch * 2 * once)]
    else:
        return None
    return 3 * batch, batch * (once + 2 * twice + 3 * thrice)
