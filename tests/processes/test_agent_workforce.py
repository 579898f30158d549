"""The workers of one agent, where the order of what is heard decides."""

import subprocess
import sys
from dataclasses import replace

from ft.job.agent import environment
from ft.job.agent.workforce import Workforce
from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat, WorkerDone, WorkerResumed, encode


class Pool:
    """Says that a worker exists when the test does."""

    def __init__(self):
        self.asked, self.born = [], []

    def fork(self, name, log, env):
        self.asked.append(name)

    def take(self):
        born, self.born = self.born, []
        return born, []


def begin(tmp_path):
    """Return a workforce, its pool, what it posts, and a worker that the pool has not reported yet."""
    place = environment.NodeContext("n0", 0, "127.0.0.1", "none", str(tmp_path), "id", 1, 1, 0)
    pool, posted = Pool(), []
    workforce = Workforce(pool, place, posted.append, lambda channel: None, Timeouts())
    return workforce, pool, posted, workforce.spawn(0, 0, 0, ("127.0.0.1", 1))


def test_a_worker_that_is_to_end_before_its_start_is_reported_may_still_save(tmp_path):
    workforce, pool, _, late = begin(tmp_path)
    workforce.terminate({late.name})
    saves = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", saves], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline()
    pool.born = [(late.name, process.pid)]
    assert workforce.hear_pool() == []
    assert process.wait(20) == 7


def test_a_worker_that_the_pool_forks_when_the_run_is_over_is_killed(tmp_path):
    workforce, pool, posted, late = begin(tmp_path)
    workforce.drop_unborn()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    pool.born = [(late.name, process.pid)]
    assert workforce.hear_pool() == []
    assert process.wait(20) == -9 and posted == []


def test_a_run_is_guarded_once_a_worker_has_committed_a_step_of_an_epoch(tmp_path):
    workforce, _, _, worker = begin(tmp_path)
    beat = Beat(age_s=0.0, epoch=0, step=7, doing="compute", since_s=0.0)
    for report in (beat, WorkerResumed(worker.name, 0, 7), beat):
        workforce._take(worker, encode(report))
        assert not workforce.is_guarded, "the first snapshots may be on their way"
    workforce._take(worker, encode(replace(beat, step=8)))
    assert workforce.is_guarded


def test_a_run_that_ends_before_the_next_heartbeat_was_guarded(tmp_path):
    workforce, _, _, worker = begin(tmp_path)
    for report in (WorkerResumed(worker.name, 0, 0), WorkerDone(worker.name, 0, 3)):
        workforce._take(worker, encode(report))
    assert workforce.is_guarded
