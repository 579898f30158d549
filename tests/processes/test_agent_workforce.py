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


def test_a_worker_that_the_pool_forks_when_the_run_is_over_is_killed(tmp_path):
    place = environment.NodeContext("n0", 0, "127.0.0.1", "none", str(tmp_path), "id", 1, 1, 0)
    pool, posted = Pool(), []
    workforce = Workforce(pool, place, posted.append, lambda channel: None, Timeouts())
    late = workforce.spawn(0, 0, 0, ("127.0.0.1", 1))
    workforce.drop_unborn()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    pool.born = [(late.name, process.pid)]
    assert workforce.hear_pool() == []
    assert process.wait(20) == -9 and posted == []
