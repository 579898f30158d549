"""Collectives that core does once per process, counted after a recovery, group by group."""

import json

import pytest
from counted_gpt import COUNTS
from ft_runs import flags, ft_run

ZERO = "--use-distributed-optimizer"
LAYOUTS = {
    "tp2 pp2, experts, interleaved": (
        4,
        f"{ZERO} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--num-experts 4 --disable-bias-linear --num-layers-per-virtual-pipeline-stage 1",
    ),
    "dp2 tp2, overlapped": (4, f"{ZERO} --tensor-model-parallel-size 2 --overlap-grad-reduce --overlap-param-gather"),
}
NEWEST = "dp2 tp2, overlapped"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.newest if name == NEWEST else ()) for name in LAYOUTS]
)
def test_a_joiner_has_counted_what_the_survivors_have(name, corpus, tmp_path):
    """At the end of the first step after a recovery, and of the next, all members of a group say the same."""
    nproc, layout = LAYOUTS[name]
    script = flags(corpus, f"{layout} --clip-grad 1.0", steps=6)
    options = "--inject kill@step=4:rank=1:phase=backward"
    done = ft_run(tmp_path / "run", script, script="tests/helpers/counted_gpt.py", nproc=nproc, options=options)
    assert done.code == 0, done.explain()
    assert len(done.named("resumed")) == 2 and not done.named("restarted"), done.explain()
    lines = [
        json.loads(line)
        for file in sorted((tmp_path / "run").glob(COUNTS.format(worker="*")))
        for line in file.read_text().splitlines()
    ]
    last = max(line["epoch"] for line in lines)
    assert last > min(line["epoch"] for line in lines)
    for step in (4, 5):
        counted = {line["rank"]: line for line in lines if line["step"] == step and line["epoch"] == last}
        assert sorted(counted) == list(range(nproc)), f"step {step}: {sorted(counted)}\n{done.explain()}"
        groups = {group["name"] for line in counted.values() for group in line["groups"]}
        for group in sorted(groups):
            compare(group, {r: g for r, line in counted.items() for g in line["groups"] if g["name"] == group}, step)


def compare(name: str, said: dict[int, dict], step: int) -> None:
    """All members of a group have begun equally many collectives, and every message sent has arrived."""
    ranks = next(iter(said.values()))["ranks"]
    collectives = {rank: report["collectives"] for rank, report in said.items()}
    assert len(set(collectives.values())) == 1, f"step {step}, group {name} of {ranks}: {collectives}"
    for source, report in said.items():
        for to, sent in report["sent"].items():
            received = said[int(to)]["received"].get(str(source), 0)
            assert received == sent, f"step {step}, group {name}: rank {source} sent {sent} to {to}, {received} came"
