"""Every kind of fault of the table, in real runs: it ends as the table says, and the losses are those without it."""

import pytest
import torch
from fault_bundles import BUNDLES
from ft_runs import Nodes, flags, ft_run
from pythons import python

from ft.base.errors import ENDED_EARLY
from ft.faults.table import HARMLESS, IN_PLACE, REPLACED, RESTARTED, TABLE, UNNOTICED
from ft.faults.verdict import of_error
from ft.observe.report.record import load
from ft.record.recoveries import recoveries

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
OUTCOMES = {IN_PLACE: "in place", REPLACED: "replaced", RESTARTED: "restart"}
ROWS = {row.name: row for row in TABLE}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in ("waited for", "out of step") else ()) for name in BUNDLES],
)
def test_every_kind_ends_as_the_table_says(name, corpus, reference, tmp_path):
    bundle = BUNDLES[name]
    layout = f"{LAYOUT} {bundle.extra}"
    saving = f"{layout} --save {tmp_path}/save --save-interval {bundle.save}" if bundle.save else layout
    faults = ",".join(ROWS[row].spec(when) for row, when in bundle.faults)
    options = f"--inject {faults} --max-restarts 5"
    done = ft_run(tmp_path / "run", flags(corpus, saving, bundle.steps), options=options)
    assert done.code == 0, done.explain()
    injected = {event.detail["number"] for event in done.named("fault_injected")}
    assert injected == set(range(1, len(bundle.faults) + 1)), done.explain()
    led_to = {event.detail["number"]: r for r in recoveries(done.events) for event in r.injected}
    for number, (row, _) in enumerate(bundle.faults, 1):
        check(ROWS[row], led_to.get(number), done)
    same = done.losses == reference(4, layout, bundle.steps)
    assert same == (name != "not noticed"), done.explain()


def check(row, recovery, done) -> None:
    if row.outcome in (HARMLESS, UNNOTICED):
        assert recovery is None, f"{row.name}: {recovery}\n{done.explain()}"
        return
    assert recovery is not None, f"{row.name} led to nothing\n{done.explain()}"
    found = (recovery.outcome, recovery.category)
    assert found == (OUTCOMES[row.outcome], row.sign.category), f"{row.name}\n{done.explain()}"
    assert recovery.signal in (row.sign.signal, *row.seldom), f"{row.name}\n{done.explain()}"


def test_a_stray_sigterm_saves_and_ends_the_run(corpus, tmp_path):
    saving = f"{LAYOUT} --save {tmp_path}/save"
    done = ft_run(tmp_path / "run", flags(corpus, saving, 2000), options="--inject terminate@step=8:rank=1")
    assert done.code == ENDED_EARLY, done.explain()
    assert "SIGTERM received" in done.output and "saved" in done.output, done.explain()
    last = len(done.losses)
    assert last < 2000 and [event.step for event in done.named("saved")] == [last], done.explain()
    assert load(done.folder).state == f"ended early (SIGTERM) at {last} of 2000"


def test_a_node_with_other_flags_is_found_before_training(corpus, tmp_path):
    with Nodes(tmp_path, flags(corpus, LAYOUT, 20), 1, nnodes=2, standby_nodes=0) as nodes:
        nodes.add(1, script_flags="--lr 2e-2")
        done = nodes[0].wait(180)
        assert nodes[1].process.wait(180) == 2
    assert done.code == 2, done.explain()
    assert "--lr: " in done.output and "0.02" in done.output and "fix: " in done.output, done.explain()
    assert not done.named("epoch_opened") and not (done.folder / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_node_that_loses_its_power_is_replaced(corpus, reference, tmp_path):
    # Data-parallel peers on different nodes, so that no node holds a state and its only copy.
    layout = f"{LAYOUT} --use-tp-pp-dp-mapping"
    with Nodes(tmp_path, flags(corpus, layout, 60), 3, "--inject kill@step=6:node=n1") as nodes:
        done = nodes[0].wait(180)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert "node lost" in [event.detail["signal"] for event in done.named("fault_detected")], done.explain()
    assert done.losses == reference(4, layout, 60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_lost_cuda_context_says_is_what_the_table_says():
    code = "from ft.faults.worker import break_cuda; break_cuda(None)"
    done = python("-c", code)
    said = [line for line in done.stderr.splitlines() if "device-side assert" in line]
    assert said, done.stderr
    kind, _, message = said[0].partition(": ")
    found = of_error([kind.rpartition(".")[2], "RuntimeError"], message)
    row = ROWS["cuda-fault"]
    assert (found.category, found.signal) == (row.sign.category, row.sign.signal)
