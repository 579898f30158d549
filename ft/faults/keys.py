"""Explanations of the keys of ``--inject`` and of scenario files, as the command ``ft faults`` prints them."""

MEANING = {
    "When: give exactly one of these keys": {
        "step": "step in which the fault happens, counted from 1.",
        "time": "time from the beginning of training: 500ms, 90s, 2m, 1h.",
        "every": "repeated faults at random times: exponential(mean=60s) or weibull(shape=0.7,scale=90s) in time, "
        "exponential(mean=20steps) or weibull(shape=0.7,scale=30steps) in steps.",
        "trace": "file of failures that were recorded in another run; each line is TIME [KIND] [RANK], or a JSON "
        "object with time.",
    },
    "Where: without any of these keys, a random rank is hit, or the target of the kind (a node, the control plane)": {
        "rank": "logical rank, or random; the fault hits the worker that holds the rank when the fault is due.",
        "node": "node (its name or number), or random; the fault hits all workers on the node.",
        "replica": "FT-HSDP replica to which rank or node belongs, or random; without it, ranks are numbered over "
        "all replicas.",
    },
    "How": {
        "phase": "point of the step, or of the next recovery from this step on, at which the fault happens; for "
        "bit-flip, part of the step.",
        "for": "duration, for kinds that end by themselves.",
        "factor": "for slow: factor by which the duration of a step grows.",
        "error": "for exception: class of the exception.",
        "copies": "for corrupt-snapshot: corrupt the worker's own snapshot, or the peer copies that it holds.",
        "value": "for corrupt-tensor: set one element to NaN, or flip one bit of it.",
        "operator": "for bit-flip: torch's name of the operator whose results are hit, such as mm; or p2p; or "
        "all-reduce.",
        "execution": "for bit-flip: which of DMR's two executions is hit, primary or checker.",
        "bit": "for bit-flip: number of the bit, counted from the lowest; any: a random bit each time.",
        "mode": "for bit-flip: once, repeat (every matching result) or stuck (the same bit from then on).",
        "nth": "for bit-flip: number of the first matching result that may be hit, counted from 1.",
        "probability": "for bit-flip: probability with which each matching result is hit.",
    },
    "How often: these keys need every or trace": {
        "count": "maximum number of faults; 1000 by default.",
        "until": "time from the beginning of training after which no more faults happen; one week by default. Not "
        "allowed with steps.",
    },
}
"""Heading -> key -> explanation."""

SEED = (
    "A seed (--seed N) fixes all random choices: kinds, logical ranks, nodes and bits are the same in every run. "
    "With step= and every=...steps, the steps are the same, too. With time=, trace= and every= in time, the times "
    "since the beginning of training are the same, but the steps depend on the speed of the run. The planned faults "
    "are in faults.NODE.json in the run's directory. A fault that is added at the end of the list changes no other "
    "fault."
)

SCENARIO = """\
# a file for --scenario: YAML (.yaml, .yml), TOML (.toml) or JSON; --inject adds faults, --seed overrides its seed
seed: 7
faults:
  - kill@step=20:rank=3                 # as for --inject
  - kind: slow                          # or with one line for each key
    every: exponential(mean=50steps)
    rank: random
    for: 5s
    count: 4
  - {kind: kill, trace: failures.txt}   # relative to the scenario's folder
"""
