"""Who is the control plane: claims, the lease, what agents do about its silence, when one lets go."""

import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from waiting import at_once, eventually

from ft.base import token
from ft.base.errors import UserError
from ft.job.agent.control_plane import (
    FENCE,
    WAIT,
    ControlPlaneSupervisor,
    SidecarProcess,
)
from ft.job.agent.membership import claim_name
from ft.job.control.timeouts import Timeouts
from ft.platform import election, processes
from ft.platform.election import LeaseKeeper, LeaseRecord
from ft.platform.supervisor import Supervisor

LIMITS = Timeouts()


def test_a_term_is_claimed_once(tmp_path):
    won = at_once(lambda number: election.claim(tmp_path, 3, f"n{number}"), range(16))
    assert sum(won) == 1 and election.newest(tmp_path) == 3
    assert election.is_over(tmp_path, 2) and not election.is_over(tmp_path, 3)


def test_a_standing_is_read_whole_or_not_at_all(tmp_path):
    assert election.read(tmp_path) is None and election.newest(tmp_path) == -1
    standing = LeaseRecord(2, 0, "tcp://h:1", "n1", 77, 5)
    election.renew(tmp_path, standing)
    assert election.read(tmp_path) == standing and os.listdir(tmp_path) == ["control.json"]
    for broken in ("", "{", "[]", '{"term": 1}'):
        (tmp_path / "control.json").write_text(broken)
        assert election.read(tmp_path) is None


def test_a_lease_that_is_renewed_is_told_from_one_that_was_left(tmp_path):
    assert not election.is_kept(tmp_path, 0.1)
    election.renew(tmp_path, LeaseRecord(0, 0, "", "n0", 1))
    assert not election.is_kept(tmp_path, 0.2)
    threading.Timer(2.0, lambda: election.renew(tmp_path, LeaseRecord(0, 0, "", "n0", 1, 1))).start()
    assert election.is_kept(tmp_path, 20.0)


def test_a_lease_is_kept_for_a_leader_that_starts_until_that_one_serves(tmp_path):
    starting = LeaseRecord(election.claim_next(tmp_path, "n0"), 0, "", "n0", 1)
    keeper = LeaseKeeper(tmp_path, 0.01, starting)
    keeper.start()
    eventually(lambda: (found := election.read(tmp_path)) is not None and found.count > 2)
    assert keeper.holds and keeper.serving(time.monotonic()) is None

    def serve():
        election.renew(tmp_path, replace(starting, where="tcp://h:1"))  # as a leader does at every beat
        return not keeper.holds

    eventually(serve)
    eventually(lambda: keeper.serving(time.monotonic()) is not None)
    keeper.close()


def test_a_lease_is_lost_to_a_later_term(tmp_path):
    keeper = LeaseKeeper(tmp_path, 0.01)
    keeper.start()
    keeper.hold(LeaseRecord(election.claim_next(tmp_path, "n0"), 0, "", "n0", 1))
    assert keeper.holds and not keeper.lost
    assert election.claim_next(tmp_path, "n1", least=7) == 7
    eventually(lambda: keeper.lost)
    assert not keeper.holds
    keeper.close()


def test_a_second_ft_run_of_a_node_joins_if_the_first_has_ended_or_it_was_asked_to(tmp_path):
    path = tmp_path / "nodes" / "n3"
    assert claim_name(tmp_path, 3, joins=False) == "n3"
    with pytest.raises(UserError, match=f"node 3 is at work: ft run on .*, pid {os.getpid()}, since 2") as no:
        claim_name(tmp_path, 3, joins=False)
    assert socket.gethostname() in str(no.value) and "add --join" in str(no.value) and os.listdir(path.parent) == ["n3"]
    election.write_holder(path, replace(election.read_holder(path), process=f"{processes.identity(os.getpid())}0"))
    assert claim_name(tmp_path, 3, joins=False) == "n3-2"
    assert claim_name(tmp_path, 3, joins=True) == "n3-3"
    assert claim_name(tmp_path, 2, joins=False) == "n2"


def test_of_a_node_on_another_host_the_lease_and_the_status_of_the_run_tell(tmp_path):
    path = tmp_path / "nodes" / "n3"
    claim_name(tmp_path, 3)
    election.write_holder(path, replace(election.read_holder(path), host="gpu7", process="elsewhere 7 7"))
    keeper = LeaseKeeper(tmp_path, 0.05, LeaseRecord(0, 0, "", "n0", 1))
    keeper.start()
    eventually(lambda: election.read(tmp_path) is not None)
    with pytest.raises(UserError, match="ft run on gpu7, pid"):
        claim_name(tmp_path, 3, joins=False)
    (tmp_path / "status.json").write_text('{"nodes": {"n3": "lost"}}')
    assert claim_name(tmp_path, 3, joins=False) == "n3-2"
    election.write_holder(path.with_name("n3-2"), election.read_holder(path))
    keeper.close()
    (tmp_path / "control.json").unlink()
    assert claim_name(tmp_path, 3, joins=False) == "n3-3"


def test_one_token_for_all_who_make_it_at_once_and_for_nobody_else(tmp_path):
    found = at_once(lambda _: token.make(tmp_path, {}), range(16))
    assert len(set(found)) == 1 and len(found[0]) == 64 and token.find(tmp_path, 0.0, {}) == found[0]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["token"]
    assert token.find(tmp_path, 0.0, {"FT_TOKEN": "given" * 4}) == "given" * 4
    assert token.make(tmp_path, {"FT_TOKEN": "given" * 4}) == "given" * 4


def test_a_token_is_not_read_through_a_link_nor_from_another_user(tmp_path):
    (tmp_path / "elsewhere").write_text("the token of another run")
    (tmp_path / "token").symlink_to("elsewhere")
    with pytest.raises(UserError, match="is no token"):
        token.find(tmp_path, 0.0, {})
    (tmp_path / "token").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "token")
    if os.geteuid() == 0:
        os.chown(tmp_path / "token", 12345, 12345)
        with pytest.raises(UserError, match="belongs to the user 12345"):
            token.find(tmp_path, 0.0, {})


def test_a_node_that_starts_before_the_control_plane_waits_for_it_and_one_that_has_lost_it_is_fenced(tmp_path):
    began = time.monotonic() - 60.0
    sidecars = (SidecarProcess(Supervisor(), tmp_path, "tcp://127.0.0.1:1", None) for _ in range(2))
    early, late = (
        ControlPlaneSupervisor(tmp_path, 1, sidecar, LIMITS, None, None, None, print) for sidecar in sidecars
    )
    assert early.decide(began, began)[0] == late.decide(began, began)[0] == WAIT

    def is_fenced():
        """Once it has looked for a lease, and there is none."""
        assert early.decide(began + 60.0, began)[0] == WAIT
        return late.decide(began + 60.0, began + 30.0)[0] == FENCE

    eventually(is_fenced)
    time.sleep(0.3)
    assert early.decide(began + 60.0, began)[0] == WAIT
    early.close()
    late.close()


def test_time_in_which_nobody_looked_at_a_lease_does_not_make_it_old(tmp_path, monkeypatch):
    """Whoever was stopped together with the leader must not take over from it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    election.renew(tmp_path, LeaseRecord(0, 0, "tcp://n0:1", "n0", 1))
    keeper = LeaseKeeper(tmp_path, 0.25)

    def polls(*times):
        for now[0] in times:
            keeper._look()

    polls(100.0, 100.25)
    assert keeper.age(124.25) < 0.6, "its event loop may go on before its thread looks"
    polls(124.25)
    assert keeper.age(124.25) == 0.25 and keeper.serving(124.25) == 0.25
    polls(*(124.25 + 0.25 * i for i in range(1, 9)))
    assert keeper.age(126.25) == 2.25, "nobody renews it"
