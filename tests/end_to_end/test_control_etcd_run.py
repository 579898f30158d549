"""Real runs whose control plane and agents meet in etcd."""

import os
import signal

from etcd_servers import etcd  # noqa: F401 - a fixture
from ft_runs import Running, flags

from ft.platform import election

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
STEPS = 90


def test_training_goes_on_when_a_worker_an_etcd_server_and_the_control_plane_are_killed(
    corpus,
    reference,
    tmp_path,
    etcd,  # noqa: F811
):
    servers = etcd(3)
    run = Running(
        tmp_path / "run",
        "pretrain_gpt.py",
        flags(corpus, LAYOUT, STEPS),
        standby=2,
        options=f"--control {servers.url} --inject kill@step=10:rank=1,kill@step=60:rank=2",
    )
    try:
        run.wait_for(lambda: run.step() >= 20)
        servers.kill(servers.leader())
        run.wait_for(lambda: run.step() >= 30)
        run.wait_for(lambda: election.read(run.folder).where)
        first = election.read(run.folder)
        os.kill(first.pid, signal.SIGKILL)
        run.wait_for(lambda: run.step() >= 40)
        done = run.wait(90)
    finally:
        run.stop()
    assert done.code == 0, done.explain()
    last = election.read(run.folder)
    assert last.term > first.term and last.where == first.where and last.where.startswith(servers.url)
    assert len(done.named("worker_lost")) == 2 and not done.named("restarted"), done.explain()
    assert done.named("control_back"), done.explain()
    assert done.losses == reference(4, LAYOUT, STEPS)
