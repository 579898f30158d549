"""How the tests run each command of the documents: the table that `test_readme.py` uses."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import small_runs

TINY = small_runs.BASE.replace("--train-iters 4", "--train-iters 8").replace("size 8", "size 12")
MEGATRON = f"{TINY} --data-path data/corpus"
LAST_STEP = "iteration        8/       8"
HUNG = "it needs a run that hangs: tests/end_to_end/test_diagnose_hang.py has some"
NO_SLURM = "it needs Slurm: tests/end_to_end/test_slurm.py runs the job scripts in a cluster of its own"
SUITE = "it is what runs this"
MENTION = "it is named, not shown; another command has it in full"
EVERY_TIME = (
    *("check", "hot-swap", "status", "report", "hsdp", "dmr-plan", "selftest", "health", "plan-snapshot"),
    *("preprocess", "train", "verify", "diagnose", "simulate-control"),
)
"""Names of the entries that run in the default tier; the others run in the long one."""


@dataclass(frozen=True)
class Walk:
    """How to run the commands that match a pattern, or why they are not run here.

    Attributes:
        name: name of the test.
        pattern: pattern for whole commands; * stands for any text.
        swaps: text in a command -> text to run instead; each has to occur.
        says: words that the output has to contain.
        makes: files that the command has to create.
        after: names of the entries that have to run before.
        before: shell commands that prepare the folder.
        code: expected exit code.
        limit_s: seconds after which the command is killed.
        only_help: run the script with --help instead of its arguments.
        not_run: why it does not run here.
    """

    name: str
    pattern: str
    swaps: dict[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: str = ""
    code: int = 0
    limit_s: float = 150.0
    only_help: bool = False
    not_run: str = ""

    def fits(self, command: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), command) is not None

    def scaled(self, command: str) -> str:
        """Return the command to run instead of a documented one."""
        if self.only_help:
            return " ".join([*command.split()[:2], "--help"])
        for shown, run in self.swaps.items():
            assert shown in command, f"{self.name}: {shown!r} is not in {command!r} any more"
            command = command.replace(shown, run)
        return command


def training(name: str, pattern: str, nproc: str, swaps: dict[str, str], says: tuple[str, ...], **how) -> Walk:
    """Return an entry for a run of the trainer: with ``nproc`` processes, and a tiny model on the corpus."""
    flags = next((shown for shown in ("<Megatron flags>", "<flags>") if shown in pattern), "")
    swaps = {**nproc_swap(nproc), **({flags: MEGATRON} if flags else {}), **swaps}
    return Walk(name, pattern, swaps, says, after=("preprocess", *how.pop("after", ())), **how)


def nproc_swap(nproc: str) -> dict[str, str]:
    """Return the swap of --nproc-per-node for "6 -> 3": 6 as documented, 3 as run."""
    shown, run = (f"--nproc-per-node {number}" for number in nproc.split(" -> "))
    return {shown: run}


def only_help(name: str, pattern: str, **how) -> Walk:
    """Return an entry for a measurement that takes too long: it runs with --help."""
    return Walk(name, pattern, says=("usage:", "--help"), only_help=True, **how)


HOT_SWAP = (
    training(
        "hot-swap",
        "ft run * --run-dir runs/a --inject * pretrain_gpt.py <Megatron flags> --ft-hot-swap",
        "4 -> 2",
        {"kill@step=20:rank=3": "kill@step=4:rank=1"},
        ("recovery 1: replaced in", "SIGKILL", "PCIe / host / kernel fault -> replace", "detect", LAST_STEP),
        makes=("runs/a/events.jsonl", "runs/a/journal.jsonl", "runs/a/metrics.jsonl", "runs/a/status.json"),
    ),
    training(
        "stragglers",
        "ft run * --run-dir runs/slow * pretrain_gpt.py <Megatron flags> --ft-hot-swap --ft-evict-stragglers 1.5",
        "4 -> 2",
        {
            "slow@step=20:rank=3": "slow@step=3:rank=1",
            "--ft-evict-stragglers 1.5": "--train-iters 60 --ft-evict-stragglers 1.5",
        },
        ("recovery 1: replaced in", "straggler -> replace", "iteration       60/      60"),
    ),
    Walk(
        "check",
        "ft check --gpus 8 pretrain_gpt.py <Megatron flags>",
        {"--gpus 8": "--gpus 2", "<Megatron flags>": MEGATRON},
        says=("accepted", "layout: 2 GPU(s)", "hot-swap (--ft-hot-swap): fits"),
    ),
    Walk("status", "ft status runs/a", says=("rank", "finished"), after=("hot-swap",)),
    Walk("report", "ft report runs/a", makes=("runs/a/timeline.png", "runs/a/report.html"), after=("hot-swap",)),
    Walk(
        "own-loop",
        "ft run * examples/own_trainer.py",
        {"--nproc-per-node 4": "--nproc-per-node 2", "rank=2": "rank=1"},
        ("recovery 1: replaced in", "step 5: loss"),
    ),
    Walk(
        "checkout",
        "ft run --nproc-per-node 4 --standby 1 Megatron-LM/pretrain_gpt.py *",
        not_run="it needs a checkout of Megatron-LM: tests/end_to_end/test_megatron_lm.py",
    ),
    Walk(
        "nvidia-trainer",
        "ft run --nproc-per-node 4 --standby 1 pretrain_gpt.py <Megatron-LM's flags> --nvidia-trainer *",
        not_run="it needs a megatron-core with NVIDIA's trainer: tests/end_to_end/test_megatron_lm.py",
    ),
    Walk(
        "checkout-replicas",
        "ft run --nproc-per-node 4 --ft-hsdp-replicas 2 Megatron-LM/pretrain_gpt.py *",
        not_run="it needs a checkout of Megatron-LM: tests/end_to_end/test_megatron_lm_replicas.py",
    ),
    Walk("protections", "ft protections", says=("hot-swap", "These protections exclude each other", "replicas")),
    Walk("faults", "ft faults", says=("SIGKILL", "corrupt-checkpoint", "phase")),
    Walk("faults-markdown", "ft faults --markdown", says=("# What happens when X fails",)),
)

SELFTEST = (
    Walk(
        "selftest",
        "ft selftest",
        {"selftest": "selftest --only versions,storage --run-dir runs/selftest"},
        ("versions", "storage", "2 passed, 0 failed, 0 skipped; 1 node"),
        makes=("runs/selftest/selftest.json",),
    ),
    Walk(
        "selftest-minutes",
        "ft selftest --minutes 3 --run-dir runs/t",
        {"--minutes 3": "--minutes 0.3"},
        ("storage   ", "left out for time", "logs: "),
    ),
    Walk(
        "selftest-only",
        "ft selftest --only training,kill --json",
        {"training,kill": "fork"},
        ('"passed": true',),
    ),
    Walk("selftest-plant", "ft selftest --only ring --plant ring", says=("what to do",), code=1),
    Walk(
        "selftest-nodes",
        "ft selftest --nodes 2 --node-rank 0 *",
        not_run="it needs two nodes: tests/processes/test_selftest_checks.py",
    ),
    Walk(
        "gpu-session",
        "tools/experiments/gpu_session.sh results",
        not_run="it is for a machine with a GPU: tests/end_to_end/test_selftest.py runs it without one",
    ),
)

BENCHES = (
    Walk("bench-hang-look", "python tools/bench/hang_look.py", says=("remember_us", "look_ms")),
    only_help("bench-hang-search", "python tools/bench/hang_search.py"),
    Walk("size-budget", "python tools/size_budget.py", says=("tests/processes",)),
    only_help("bench-recovery", "python tools/bench/recovery.py *"),
    only_help("bench-protection", "python tools/bench/protection.py"),
    only_help("bench-control", "python tools/bench/control.py"),
    only_help("bench-hsdp", "python tools/bench/hsdp_recovery.py *"),
    only_help("bench-hsdp-step", "python tools/bench/hsdp_step.py"),
    Walk(
        "bench-ftar",
        "python tools/bench/ftar.py",
        {"ftar.py": "ftar.py --processes 2 --mib 1 --types fp32"},
        ('"bench": "ftar"',),
    ),
    Walk(
        "bench-fetch",
        "python tools/bench/hsdp_fetch.py",
        {"fetch.py": "fetch.py --mib 4 --rounds 1"},
        ('"bench": "hsdp_fetch"',),
    ),
    only_help("bench-step-clock", "python tools/bench/step_clock.py"),
    Walk("bench-quorum", "python tools/bench/quorum.py", {"quorum.py": "quorum.py --rounds 5"}, ('"quorum_ms"',)),
    only_help("bench-step", "python tools/bench/step_time.py"),
    only_help("fault-campaign", "python tools/experiments/fault_campaign.py *"),
    only_help("hsdp-campaign", "python tools/experiments/hsdp_campaign.py *"),
    only_help("every-rung", "python tools/experiments/every_rung.py *"),
    only_help("composed-campaign", "python tools/experiments/composed_campaign.py *"),
    only_help("bench-combinations", "python tools/bench/combinations.py *"),
    Walk(
        "ladder-campaign",
        "python tools/experiments/recovery_ladder.py *",
        {"ladder.py": "ladder.py --situations 2000"},
        ("2000 situations", "0 broken"),
        makes=("ladder.png",),
    ),
)

REPLICAS = (
    training(
        "hsdp",
        "ft run * --ft-hsdp-replicas 3 --run-dir runs/h * pretrain_gpt.py <Megatron flags>",
        "6 -> 3",
        {"kill@replica=1:step=10:rank=1": "kill@replica=1:step=4:rank=0"},
        ("replica 1",),
        makes=("runs/h/replica-0/commits.jsonl",),
    ),
    training(
        "hsdp-standby",
        "ft run * --ft-hsdp-replicas 3 --standby 1 * pretrain_gpt.py <Megatron flags> --ft-hot-swap",
        "6 -> 6",
        {"kill@replica=1:step=10:rank=1": "kill@replica=1:step=4:rank=1"},
        ("replica 1",),
    ),
    Walk(
        "hsdp-report",
        "ft report runs/h",
        makes=("runs/h/timeline.png", "runs/h/report.html"),
        after=("hsdp",),
    ),
    Walk("paper-hsdp", "python tools/experiments/papers.py ft-hsdp", says=("12 replicas", "80.0 %")),
)

SPARE = (
    training(
        "spare",
        "ft run * --ft-spare-redundancy 2 --run-dir runs/s * pretrain_gpt.py <Megatron flags>",
        "6 -> 3",
        {"kill@replica=1:step=10:rank=1": "kill@replica=1:step=4:rank=0"},
        ("replica 1",),
    ),
    training(
        "spare-standby",
        "ft run * --ft-spare-redundancy 2 --standby 1 pretrain_gpt.py <Megatron flags> --ft-hot-swap",
        "6 -> 6",
        {"--standby 1": "--standby 1 --inject kill@replica=1:step=4:rank=0"},
        ("replica 1",),
    ),
    Walk("spare-report", "ft report runs/s", makes=("runs/s/report.html",), after=("spare",)),
    Walk("spare-place", "ft plan spare place *", says=("ruler",)),
    Walk("spare-reorder", "ft plan spare reorder *", says=("stack", "phase", "types were moved")),
    Walk("paper-spare", "python tools/experiments/papers.py spare", {" spare": " spare --trials 2"}, ("Table 2",)),
    Walk(
        "spare-plan",
        "ft plan buy scenario.toml --replicas 16 *",
        {"scenario.toml": "scenario.toml --failures 400"},
        ("SPARe", "To run it"),
        makes=("plan.json",),
        after=("plan-init",),
    ),
)

DMR = (
    Walk(
        "dmr-profile",
        "ft dmr profile --out prof.json -- torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron flags>",
        {"torchrun --nproc-per-node 4": "torchrun --standalone --nproc-per-node 2", "<Megatron flags>": MEGATRON},
        ("operators", "windows"),
        makes=("prof.json",),
        after=("preprocess",),
    ),
    Walk(
        "dmr-plan",
        "ft dmr plan prof.json *",
        makes=("plan.json", "plan.png"),
        after=("dmr-profile",),
    ),
    Walk("dmr-explain", "ft dmr explain plan.json", says=("operators",), after=("dmr-plan",)),
    training(
        "dmr-run",
        "ft run * pretrain_gpt.py <flags> --ft-hot-swap --ft-dmr-plan plan.json",
        "4 -> 2",
        {},
        (LAST_STEP,),
        after=("dmr-plan",),
    ),
    training(
        "dmr-piggyback",
        "torchrun * pretrain_gpt.py <flags> --ft-dmr piggyback",
        "2 -> 2",
        {"torchrun": "torchrun --standalone"},
        (LAST_STEP,),
    ),
    Walk(
        "dmr-selftest",
        "ft dmr selftest",
        {"selftest": f"selftest --runs 1 --layers 1 --flags '{small_runs.BASE}'"},
        ("operators",),
    ),
    Walk(
        "dmr-estimate",
        "ft dmr estimate *",
        {"80GB": "80GB --batch 6"},
        ("llama3-70b", "memory: 80.0 GB budget"),
    ),
)

CHECKFREE = (
    training(
        "checkfree",
        "ft run * pretrain_gpt.py <flags> --pipeline-model-parallel-size 6 --ft-hot-swap --ft-checkfree",
        "6 -> 4",
        {"--standby 2": "--standby 1", "--pipeline-model-parallel-size 6": "--pipeline-model-parallel-size 4"},
        (LAST_STEP,),
    ),
    Walk(
        "checkfree-plus",
        "ft run ... --ft-hot-swap --ft-checkfree-plus",
        {"...": f"--nproc-per-node 4 pretrain_gpt.py {MEGATRON} --pipeline-model-parallel-size 4"},
        (LAST_STEP,),
        after=("preprocess",),
    ),
    Walk(
        "checkfree-without-copies",
        "ft run ... --ft-hot-swap --ft-checkfree --ft-snapshot-peers 0",
        {"...": f"--nproc-per-node 3 pretrain_gpt.py {MEGATRON} --pipeline-model-parallel-size 3 --num-layers 3"},
        (LAST_STEP,),
        after=("preprocess",),
    ),
    Walk(
        "schedule",
        "ft plan schedule *",
        says=("6 stages, 24 microbatches", "bubbles 17.2 %"),
        makes=("s.png",),
    ),
    Walk("policy", "ft plan policy", says=("rung", "--ft-checkfree")),
    training(
        "composed",
        "ft run * --ft-hsdp-replicas 2 --standby 1 pretrain_gpt.py <flags> --ft-hot-swap --ft-dmr piggyback",
        "4 -> 4",
        {"--global-batch-size 12": "--global-batch-size 8"},
        ("the run has finished",),
    ),
    Walk("ladder", "ft plan policy --pp 4 *", says=("standby", "control.assemble_s")),
    Walk("ladder-stage", "ft plan policy --lost 2,3 *", says=("CheckFree", "approximate")),
    Walk("ladder-replicas", "ft plan policy --lost 0:2,3 *", says=('"rung": "another replica"', '"late"')),
    Walk("paper-checkfree", "python tools/experiments/papers.py checkfree", says=("fitted", "predicted")),
)

_DUMPS = """
import json
def entry(n): return dict(record_id=n, process_group=["0", "default_pg"], collective_seq_id=n + 1,
    profiling_name="nccl:all_reduce", input_sizes=[[4]], state="started" if n else "completed")
for rank in (0, 1):
    dump = dict(version="2.10", entries=[entry(n) for n in range(2 - rank)], pg_config={})
    json.dump(dump, open(f"traces/trace_{rank}.json", "w"))
"""
"""Writes the dumps of two ranks, of which rank 1 has not started the second all-reduce."""

DIAGNOSE = (
    Walk(
        "diagnose",
        "ft diagnose compare runs/a runs/b runs/c",
        {"runs/a runs/b runs/c": "runs/mine runs/mine-b runs/mine-c"},
        ("equal",),
        after=("train",),
        before="cp -r runs/mine runs/mine-b && cp -r runs/mine runs/mine-c",
    ),
    Walk("silent", "ft diagnose silent runs/a", says=("1 run", "no mismatch"), after=("hot-swap",)),
    Walk(
        "silent-out",
        "ft diagnose silent runs/a --out suspects.json",
        says=("no mismatch", "suspects.json has 0 device(s) now"),
        makes=("suspects.json",),
        after=("hot-swap",),
    ),
    Walk(
        "suspects",
        "ft run --suspects suspects.json ...",
        {"...": f"--nproc-per-node 2 pretrain_gpt.py {MEGATRON} --ft-hot-swap"},
        (LAST_STEP,),
        after=("silent-out",),
    ),
    Walk("hang", "ft diagnose hang runs/hung*", not_run=HUNG),
    Walk(
        "hang-traces",
        "ft diagnose hang --traces traces",
        says=("cause 1: busy: rank 1", "all_reduce number 2"),
        code=1,
        before=f"mkdir -p traces; python -c '{_DUMPS}'",
    ),
    Walk("crash", "ft diagnose crash runs/a", says=("no crash", "recovered from"), after=("hot-swap",)),
    Walk("start", "ft diagnose start runs/a", says=("the run has made its first step",), after=("hot-swap",)),
)

HEALTH = (
    Walk(
        "health",
        "ft health",
        {"health": "health --root node"},
        ("no findings", "memory.oom_kills", "cannot be read: GPUs"),
        before="mkdir -p node/proc && echo 'oom_kill 3' > node/proc/vmstat",
    ),
    Walk(
        "health-watch",
        "ft health --watch 10 --json",
        not_run="it runs until it is interrupted: tests/processes/test_health_command.py",
    ),
    Walk("health-rules", "ft health --rules", says=("xid.79", "drain", "GPU memory fault")),
)

CLUSTER = (
    Walk("srun", "srun *", not_run=NO_SLURM),
    Walk("sbatch", "sbatch *", not_run=NO_SLURM),
    Walk("salloc", "salloc *", not_run=NO_SLURM),
    Walk("scancel", "scancel *", not_run=NO_SLURM),
    Walk("scontrol", "scontrol *", not_run=NO_SLURM),
    Walk("later-replica", "ft run * --ft-hsdp-replica 2 --run-dir DIR ...", not_run=NO_SLURM),
    Walk("etcd", "ft run --control etcd://*", not_run="it needs etcd's servers: test_control_etcd_run.py"),
    Walk("mpirun", "mpirun *", not_run="it needs an MPI with fault tolerance: tests/end_to_end/test_mpi_run.py"),
    Walk(
        "limits",
        "ft run --limits limits.yaml ...",
        {"...": f"--nproc-per-node 2 pretrain_gpt.py {MEGATRON} --ft-hot-swap"},
        (LAST_STEP,),
        after=("preprocess",),
        before="echo 'stall_s: 12' > limits.yaml",
    ),
    Walk(
        "topology",
        "ft run --topology racks.txt ...",
        {"...": f"--nproc-per-node 2 pretrain_gpt.py {MEGATRON} --ft-hot-swap"},
        (LAST_STEP,),
        after=("preprocess",),
        before='for host in $(hostname) $(hostname -s); do echo "$host rack=a"; done | sort -u > racks.txt',
    ),
)

PLANS = (
    Walk("plan-snapshot", "ft plan snapshot *", says=("64 nodes, 512 ranks: TP8 x DP16 x PP4", "copies")),
    Walk(
        "plan-buy",
        "ft plan buy --gpus 4096 * --plot buy.png",
        {"--plot": "--failures 400 --plot"},
        ("4,096 GPUs on 512 nodes", "Buy "),
        makes=("buy.png",),
    ),
    Walk(
        "plan-buy-short",
        "ft plan buy --gpus 4096 * 24h",
        {"24h": "24h --failures 400"},
        ("what would change",),
    ),
    Walk("plan-init", "ft plan buy --init", says=("wrote scenario.toml",), makes=("scenario.toml",)),
    Walk("plan-spares", "ft plan spares *", {"spares": "spares --failures 400"}, ("standbys",), after=("plan-init",)),
    Walk(
        "plan-interval", "ft plan interval *", {"interval": "interval --failures 400"}, ("Daly",), after=("plan-init",)
    ),
    Walk("plan-dmr", "ft plan dmr *", {"80gb.toml": "80gb.toml --batch 8"}, ("naive DMR",)),
    Walk(
        "bench-connections",
        "python tools/bench/connections.py *",
        {"8 64 512 4096": "8"},
        ('"kind": "least"', '"most_connections"'),
    ),
    Walk(
        "simulate-hangs",
        "python -m tests.simulation hangs *",
        {"--cases 2000 --jobs 2": "--cases 10 --jobs 1"},
        ("rank named", "all "),
    ),
    Walk(
        "simulate-control",
        "python -m tests.simulation control *",
        {"--seeds 10000 --jobs 2": "--seeds 10 --jobs 2"},
        ("10 histories", "epochs", "histories by outcome"),
    ),
    Walk(
        "simulate-hsdp-protocol",
        "python -m tests.simulation hsdp *",
        {"1000 --plant all": "10 --plant 'does not answer the last member'"},
        ("found by seed", "does not answer the last member"),
    ),
)

TRAINING = (
    Walk(
        "train",
        "torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 *",
        {
            "torchrun": "torchrun --standalone",
            "--nproc-per-node 4": "--nproc-per-node 2",
            "--tensor-model-parallel-size 2": "--tensor-model-parallel-size 1",
            "--num-layers 4 --hidden-size 128": "--num-layers 2 --hidden-size 32",
            "--seq-length 128": "--seq-length 32",
            "--micro-batch-size 8 --global-batch-size 32 --train-iters 100": "--micro-batch-size 2 "
            "--global-batch-size 8 --train-iters 4 --log-interval 1",
            "runs/quickstart/data/stdlib": "data/corpus",
            "--eval-iters 8": "--eval-iters 1",
            "--save-interval 50": "--save-interval 2",
        },
        ("iteration        4/       4", "pipeline", "megatron-core"),
        makes=("runs/mine/latest_checkpointed_iteration.txt", "runs/mine.jsonl"),
        after=("preprocess",),
    ),
    Walk("help", "python pretrain_gpt.py --help", says=("--hidden-size", "--ft-hot-swap")),
    Walk(
        "preprocess",
        "python tools/preprocess_data.py --input *",
        {"FILE_OR_FOLDER [...]": "sources"},
        ("documents", "tokens", "unigram entropy"),
        makes=("data/corpus.bin", "data/corpus.idx", "data/corpus.meta.json"),
    ),
    Walk(
        "verify",
        "python -m megatron.ft_trainer.checkpointing verify runs/mine",
        says=("iter_0000004: ok", "sound checkpoints"),
        after=("train",),
    ),
    Walk(
        "generate",
        "python tools/generate_text.py *",
        {"'def '": "'def ' --tokens 5"},
        ("def ",),
        after=("train",),
    ),
    Walk("plot", "python tools/plot_loss.py *", makes=("loss.png",), after=("train",)),
    Walk("patches", "python -m megatron.patches", says=("megatron-core", "supported")),
)

REST = (
    Walk("quickstart", "./examples/quickstart.sh", not_run="it installs and trains for minutes"),
    Walk("suite", "./tests/run.sh*", not_run=SUITE),
    Walk("suite-newest", "./tests/newest.sh*", not_run=SUITE),
    Walk("suite-pytest", "python -m pytest *", not_run=SUITE),
    Walk("ruff", "python -m ruff *", not_run="tests/run.sh does it first"),
    Walk("contracts", "lint-imports --no-logo", not_run="tests/run.sh does it first"),
    Walk("make", "make *", not_run="each entry is another command of CONTRIBUTING.md"),
    Walk("types", "python -m mypy", not_run="tests/run.sh does it first"),
    Walk("page-of-faults", "python -m ft.faults.page", not_run="it writes what test_faults_table.py compares"),
    Walk("pip", "pip install *", not_run="a test installs nothing"),
    Walk("mention-inject", "ft run --inject", not_run=MENTION),
    Walk("mention-health", "ft run --health", not_run=MENTION),
    Walk("mention-status", "ft status DIR", not_run=MENTION),
    Walk("mention-report", "ft report DIR", not_run=MENTION),
)

TABLE: tuple[Walk, ...] = (
    *HOT_SWAP, *SELFTEST, *BENCHES, *REPLICAS, *SPARE, *DMR, *CHECKFREE, *DIAGNOSE, *HEALTH, *CLUSTER, *PLANS,
    *TRAINING, *REST
)  # fmt: skip


def entry_for(command: str) -> Walk | None:
    """Return the first entry that matches."""
    return next((walk for walk in TABLE if walk.fits(command)), None)


def unused(commands: Iterable[str]) -> list[str]:
    """Return the names of the entries that match no command."""
    used = {walk.name for command in commands if (walk := entry_for(command))}
    return [walk.name for walk in TABLE if walk.name not in used]
