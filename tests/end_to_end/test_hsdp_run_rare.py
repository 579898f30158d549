"""FT-HSDP with the real trainer: faults at the moments that a run seldom meets."""

import pytest
import replica_runs
from replica_runs import train

pytestmark = pytest.mark.long
SLOWLY = "slow@replica=0:step=2:rank=0:factor=2:for=300s"


def test_one_whose_step_fails_when_it_has_just_fetched_computes_with_the_model_of_what_it_fetched(corpus, tmp_path):
    """In bf16 its own model would be another one, which the digests of the parameters would show."""
    faults = ("kill@replica=1:step=5:rank=0:phase=forward", "drop@replica=1:step=5:rank=1:phase=restore", SLOWLY)
    flags = replica_runs.flags(corpus, "--use-distributed-optimizer --bf16", 25, 8)
    done = train(tmp_path / "run", flags, replicas=2, nproc=4, options=f"--inject {','.join(faults)}")
    done.check(25, 2)
    assert len(done.injected()) == 3, done.explain()


@pytest.mark.parametrize(
    "fault", ["kill@replica=0:step=12:rank=0:phase=save", "kill@replica=0:step=12:rank=0:phase=optimizer"]
)
def test_the_last_checkpoint_is_there_though_its_writer_is_killed(fault, corpus, tmp_path):
    flags = replica_runs.flags(corpus, f"--save {tmp_path}/saved", 12)
    done = train(tmp_path / "run", flags, replicas=3, nproc=3, options=f"--inject {fault}")
    done.check(12, 2)
    assert len(done.injected()) == 1, done.explain()
    assert [path.name for path in (tmp_path / "saved").glob("iter_*")] == ["iter_0000012"], done.explain()
