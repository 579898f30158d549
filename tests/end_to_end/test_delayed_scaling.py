"""fp8 with delayed scaling: its scales and histories survive a recovery (a stand-in for Transformer Engine)."""

import pytest
from ft_runs import flags, ft_run
from test_hot_swap import PHASES, ZERO

SCRIPT = "tests/helpers/delayed_scaling_gpt.py"
LAYOUTS = {
    "tp2 dp2": (4, f"{ZERO} --tensor-model-parallel-size 2"),
    "interleaved": (4, f"{ZERO} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.mark.parametrize("name", [pytest.param("tp2 dp2", marks=pytest.mark.long), "interleaved"])
def test_losses_after_faults_are_those_without(name, corpus, reference, tmp_path):
    nproc, layout = LAYOUTS[name]
    steps = 2 + 3 * len(PHASES)
    extra = f"{layout} --eval-interval 3 --eval-iters 1"
    saving = f"{extra} --save {tmp_path}/save --save-interval 3"
    # the first fault comes before any layer was called
    faults = ",".join(
        f"kill@step={max(1, 3 * i)}:rank={i % nproc}:phase={phase}" for i, phase in enumerate(("optimizer", *PHASES))
    )
    given = {"nproc": nproc, "script": SCRIPT}
    without = ft_run(tmp_path / "without", flags(corpus, extra, steps), **given)
    done = ft_run(tmp_path / "with", flags(corpus, saving, steps), options=f"--inject {faults}", **given)
    assert without.code == 0 and done.code == 0, without.explain() + done.explain()
    assert len(done.named("fault_injected")) == len(PHASES) + 1, done.explain()
    assert not done.named("restarted") and not done.named("step_differs"), done.explain()
    assert done.losses == without.losses != reference(nproc, extra, steps)
