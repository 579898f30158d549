"""The file of ``ft run --limits``: what may be in it, and where its values take effect."""

import json
from dataclasses import replace

import pytest
from test_agent_rules import PLACE, options

from ft.base.errors import UserError
from ft.job.agent import environment
from ft.job.control.timeouts import BEHIND_ETCD, Timeouts, timeouts_of
from ft.job.replicas import member
from ft.worker.session import surroundings


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "limits.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.yaml", "stall_s: 20\ncollective_s: 0.5m\ndrain_s: 40"),
        ("l.toml", 'stall_s = 20\ncollective_s = "30s"\ndrain_s = 40.0'),
        ("l.json", '{"stall_s": 20, "collective_s": 30, "drain_s": 40}'),
    ],
)
def test_given_values_replace_the_defaults(write, name, text):
    expected = Timeouts(stall_s=20.0, collective_s=30.0, drain_s=40.0)
    found = timeouts_of(write(text, name), {})
    assert found == expected and found.changed() == {"stall_s": 20.0, "collective_s": 30.0, "drain_s": 40.0}


def test_without_a_file_the_values_are_the_defaults_of_the_control_channel(write):
    assert timeouts_of(None, {}) == Timeouts()
    assert timeouts_of(None, BEHIND_ETCD) == Timeouts(**BEHIND_ETCD)
    assert timeouts_of(write("fence_s: 5.8"), BEHIND_ETCD) == Timeouts(**{**BEHIND_ETCD, "fence_s": 5.8})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1", "is not a table of timeouts"),
        ("stal_s: 3", "there is no timeout stal_s\n  fix: did you mean stall_s"),
        ("stall_s: soon", "stall_s 'soon': not a time"),
        ("stall_s: true", "stall_s True: not a time"),
        ("stall_s: -1", "stall_s -1: not a time"),
        ("stall_s: [", "is not YAML"),
        ("stall_s: 12\nwrong: 1\nbeat_s: x", "2 problems"),
        ("stall_s: 100", "silent_s = 30 s is not longer than stall_s = 100 s"),
        ("stall_s: 100", "collective_s = 15 s is not longer than stall_s = 100 s"),
    ],
)
def test_what_cannot_work_is_refused_with_the_file_and_the_fix(write, text, says):
    path = write(text)
    with pytest.raises(UserError) as refused:
        timeouts_of(path, {})
    assert path in str(refused.value) and says in str(refused.value) and "fix: " in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        timeouts_of(str(tmp_path / "none.yaml"), {})


def test_the_flag_reaches_agents_workers_and_replicas(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    given = options(f"--limits {write('stall_s: 12')} --run-dir r train.py")
    assert given.timeouts == Timeouts(stall_s=12.0)
    assert member.unpack(member.pack(given, [], None))[0].timeouts == given.timeouts
    place = replace(PLACE, options=given)
    env = environment.worker_environment(place, "n0.w0", 0, 0, 0, ("h", 1))
    assert Timeouts.of_worker(env) == given.timeouts and Timeouts.of_worker({}) == Timeouts()
    assert json.loads(surroundings(env)["limits"]) == {"stall_s": 12.0}, "compared between the workers"
