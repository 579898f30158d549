"""Explanations of the keys of ``--inject`` and of scenario files, as the command ``ft faults`` prints them."""

MEANING = {
    "When: exactly one of these": {
        "step": "in which step; the first one is 1.",
        "time": "how long after training began: 500ms, 90s, 2m, 1h.",
        "every": "again and again, at random: exponential(mean=60s) or weibull(shape=0.7,scale=90s) by the clock, "
        "exponential(mean=20steps) or weibull(shape=0.7,scale=30steps) by steps.",
        "trace": "a file of failures that happened elsewhere; a line: TIME [KIND] [RANK], or a JSON object with time.",
    },
    "Where; without any of them a random rank, or what the kind is about (a node, the control plane)": {
        "rank": "which logical rank, or random: whoever holds it when the fault is due.",
        "node": "which node (its name or number), or random: all that runs there.",
        "replica": "of FT-HSDP, whose rank or node is meant, or random; without it ranks count over all replicas.",
    },
    "How": {
        "phase": "at which point of the step, or of a recovery from it on; of a bit-flip, in which part of the step.",
        "for": "how long it lasts, for kinds that end by themselves.",
        "factor": "of slow: how many times as long a step takes.",
        "error": "of exception: what the exception is about.",
        "copies": "of corrupt-snapshot: the worker's own snapshot, or the peer copies that it holds.",
        "value": "of corrupt-tensor: what becomes of one element, a NaN or one flipped bit.",
        "operator": "of bit-flip: whose results are hit: a name of torch's, such as mm, or p2p, or all-reduce.",
        "execution": "of bit-flip: which of DMR's two executions is hit, primary or checker.",
        "bit": "of bit-flip: which bit, counted from the lowest; any: another one each time.",
        "mode": "of bit-flip: once, repeat (every result that fits) or stuck (the same bit from then on).",
        "nth": "of bit-flip: the first result that may be hit, counted from 1 among those that fit.",
        "probability": "of bit-flip: with which each result that fits is hit.",
    },
    "How often: with every and trace": {
        "count": "at most so many faults; without it 1000.",
        "until": "none later than this, counted from the beginning of training; without it a week. Not with steps.",
    },
}
"""Heading -> key -> explanation."""

SEED = (
    "A seed (--seed N) fixes all that is left open: kinds, logical ranks, nodes, bits are the same in every run. With "
    "step= and every=...steps so are the steps. With time=, trace= and every= by the clock the times since training "
    "began are, and not the steps, which depend on how fast the run is. The plan is in faults.NODE.json in the run's "
    "directory. A fault that is added at the end of the list changes no other."
)

SCENARIO = """\
# what --scenario takes: YAML (.yaml, .yml), TOML (.toml) or JSON; --inject adds to it, --seed goes before its seed
seed: 7
faults:
  - kill@step=20:rank=3                 # as for --inject
  - kind: slow                          # or key by key
    every: exponential(mean=50steps)
    rank: random
    for: 5s
    count: 4
  - {kind: kill, trace: failures.txt}   # found from the scenario's folder
"""
