"""The workers of one agent, where the order of what is heard decides."""

import subprocess
import sys

from ft.job.agent import environment
from ft.job.agent.workforce import Workforce
from ft.job.control.timeouts import Timeouts


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
