"""What a run keeps where no node can take it along, with both engines: the shared folder, and servers of etcd."""

import base64
import sys
from functools import partial
from pathlib import Path

import pytest
from waiting import at_once, eventually

from ft.base.errors import UserError
from ft.platform import election, shared_state
from ft.platform.shared_state import Etcd, Folder, keep_on_etcd

TOKEN = "the token of the test"


@pytest.fixture(params=["folder", "etcd"])
def nodes(request, tmp_path):
    """Return a function: number of a node -> the run's folder on that node."""
    if request.param == "folder":
        return lambda number: tmp_path
    url = request.getfixturevalue("etcd")(1).url

    def folder_of(number: int) -> Path:
        folder = tmp_path / f"node{number}" / "run"
        if not folder.exists():
            folder.mkdir(parents=True)
            keep_on_etcd(folder, url, "run", TOKEN)
        return folder

    return folder_of


def test_a_value_is_seen_by_all_nodes_whole(nodes):
    here, there = (shared_state.of(nodes(number)) for number in range(2))
    assert there.get("lease") is None
    for value in (b"one", b"", bytes(range(256)) * 100):
        here.put("lease", value)
        assert there.get("lease") == value


def test_one_of_many_creates_a_value(nodes):
    states = [shared_state.of(nodes(number)) for number in range(3)]
    created = at_once(lambda number: states[number % 3].create("terms/7", b"%d" % number), range(12))
    assert sum(created) == 1 and states[0].names("terms") == ["7"]
    assert states[0].get("terms/7") == b"%d" % created.index(True)


def test_parts_of_a_run_have_values_of_their_own(nodes):
    folder, other = nodes(0), nodes(1)
    for part in ("replica-1", "launchers/place-2"):
        for node in (folder, other):
            (node / part).mkdir(parents=True, exist_ok=True)
        assert election.newest(folder / part) == -1
        assert election.claim(folder / part, 3, "n0") and not election.claim(other / part, 3, "n1")
        assert election.newest(other / part) == 3
    assert election.newest(folder) == -1


def test_a_leader_is_found_and_replaced_on_another_node(nodes):
    first, second = nodes(0), nodes(1)
    lease = election.LeaseRecord(election.claim_next(first, "n0"), 0, "", "n0", 1)
    election.renew(first, lease)
    assert election.read(second) == lease and not election.is_over(first, lease.term)
    assert election.claim_next(second, "n1") == lease.term + 1
    keeper = election.LeaseKeeper(first, 0.02, lease)
    keeper.start()
    eventually(lambda: keeper.lost)
    keeper.close()
    assert election.is_over(first, lease.term)


def test_a_log_goes_on_where_its_last_writer_has_stopped(nodes):
    first = shared_state.of(nodes(0)).log("journal.jsonl")
    first.write(b"a\n", b"b\n")
    second = shared_state.of(nodes(1)).log("journal.jsonl")
    assert (first.size, second.size) == (0, 4)
    second.write(b"x" * 700_000 + b"\n")
    first.write(b"late\n")  # it was paused, and does not know that it has a successor
    second.write(b"c\n")
    for log in (first, second):
        log.close()
    expected = b"a\nb\n" + b"x" * 700_000 + b"\nlate\nc\n"
    assert shared_state.of(nodes(2)).read_log("journal.jsonl") == expected
    assert shared_state.of(nodes(2)).read_log("none") == b""


@pytest.fixture
def run(tmp_path):
    return partial(keep_on_etcd, tmp_path, run="run", token=TOKEN)


def test_lines_wait_for_a_majority_and_come_once(etcd, tmp_path, run, capsys):
    servers = etcd(3)
    run(servers.url)
    state = shared_state.of(tmp_path)
    log = state.log("log")
    log.write(b"0\n")
    servers.kill(servers.leader())
    expected = [0]
    for _ in range(20):
        expected.append(expected[-1] + 1)
        log.write(b"%d\n" % expected[-1])
    servers.kill(next(iter(servers._processes)))
    for _ in range(3):
        expected.append(expected[-1] + 1)
        log.write(b"%d\n" % expected[-1])
    assert "wait in memory" in capsys.readouterr().err
    with pytest.raises(OSError, match="does not answer"):
        state.put("any", b"")
    assert election.read(tmp_path) is None and not election.is_over(tmp_path, 0)
    for member in {0, 1, 2} - set(servers._processes):
        servers.start(member)
    servers.wait()
    eventually(lambda: log.write() or not log._waiting)
    assert [int(line) for line in state.read_log("log").splitlines()] == expected
    assert (tmp_path / "log").read_bytes() == state.read_log("log"), "a copy on this node"


def test_the_rest_of_a_line_whose_writer_died_spoils_no_other(etcd, tmp_path, run):
    run(etcd(1).url)
    state = shared_state.of(tmp_path)
    state.log("log").write(b"half of a li")
    log = state.log("log")
    log.write(b"whole\n")
    assert state.read_log("log").splitlines() == [b"half of a li", b"whole"]


def test_what_a_stranger_writes_counts_for_nothing(etcd, tmp_path, run):
    servers = etcd(1)
    root = run(servers.url)
    state = shared_state.of(tmp_path)
    state.put("lease", b"mine")
    log = state.log("log")
    log.write(b"a\n")

    def stranger(key: str, value: bytes) -> None:
        body = {"key": base64.b64encode(key.encode()).decode(), "value": base64.b64encode(value).decode()}
        assert "header" in servers.ask(0, "kv/put", body)

    stranger(f"{root}lease", b"his")
    assert state.get("lease") is None
    stranger(f"{root}terms/9", b"his")
    assert state.names("terms") == []
    for name in (f"{2:020d}", f"{4:020d}", "zzz"):
        stranger(f"{root}log/{name}", b"his\n")
    log.write(b"b\n")
    assert shared_state.of(tmp_path).read_log("log") == b"a\nb\n"
    key = base64.b64encode(f"{root}log/{0:020d}".encode()).decode()
    value = base64.b64decode(servers.ask(0, "kv/range", {"key": key})["kvs"][0]["value"])
    stranger(f"{root}other", value)  # under another name
    assert state.get("other") is None


def test_users_of_etcd_say_their_password(etcd, tmp_path, run, monkeypatch):
    servers = etcd(1)

    def below(path: str) -> dict:
        first, end = path.encode(), path[:-1].encode() + b"0"
        return {"key": base64.b64encode(first).decode(), "range_end": base64.b64encode(end).decode()}

    for path, body in (
        ("auth/user/add", {"name": "root", "password": "se cret"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/user/add", {"name": "trainer", "password": "of steam"}),
        ("auth/role/add", {"name": "trainers"}),
        ("auth/role/grant", {"name": "trainers", "perm": {"permType": "READWRITE", **below("site/ft/")}}),
        ("auth/user/grant", {"user": "trainer", "role": "trainers"}),
        ("auth/enable", {}),
    ):
        assert "header" in servers.ask(0, path, body), path
    hosts = servers.url.removeprefix("etcd://")
    with monkeypatch.context() as impatient:
        impatient.setattr(shared_state, "_READ_S", 0.5)
        for wrong in (f"etcd://{hosts}", f"etcd://root:guess@{hosts}"):
            with pytest.raises(UserError):
                run(wrong)
    assert run(f"etcd://root:se%20cret@{hosts}").startswith("ft/run-")
    shared_state.of(tmp_path).put("a", b"1")
    shared_state._on_etcd.cache_clear()  # as in another process
    monkeypatch.setenv("ETCDCTL_USER", "trainer:of steam")
    with monkeypatch.context() as impatient, pytest.raises(UserError, match="permission denied"):
        impatient.setattr(shared_state, "_READ_S", 5.0)
        run(f"etcd://{hosts}")
    assert run(f"etcd://{hosts}/site/ft").startswith("site/ft/run-")
    shared_state.of(tmp_path).put("a", b"1")


def test_nobody_but_the_user_reads_where_the_values_are(etcd, tmp_path, run):
    run(etcd(1).url)
    pointer = tmp_path / shared_state.POINTER
    assert pointer.stat().st_mode & 0o777 == 0o600 and TOKEN not in pointer.read_text()


def test_without_etcd_there_is_no_shared_state(run, monkeypatch):
    monkeypatch.setattr(shared_state, "_READ_S", 0.5)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"):
        run("etcd://127.0.0.1:1")


def test_a_missing_library_is_named_with_the_command_that_installs_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    monkeypatch.setattr(shared_state, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="etcd3gw") as caught:
        run("etcd://127.0.0.1:2379")
    assert "pip install 'megatron-ft[etcd]'" in caught.value.fix


def test_a_folder_without_a_pointer_keeps_its_values_itself(tmp_path):
    assert isinstance(shared_state.of(tmp_path), Folder) and not isinstance(shared_state.of(tmp_path), Etcd)
