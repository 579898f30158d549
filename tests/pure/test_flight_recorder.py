"""Dumps of torch's flight recorder: formats, damaged and harmful files, and what is said of a hang."""

import json
import os
import pickle

import pytest

from ft.base.errors import UserError
from ft.faults.hang.causes import diagnose
from ft.observe.diagnose.flight_recorder import read

FRAME = [{"name": "all_reduce", "filename": "/x/torch/distributed/c.py", "line": 1}]
FRAME += [{"name": "step", "filename": "train.py", "line": 7}]


def entry(number, name="all_reduce", sequence=1, done=True, size=4, group=("0", "default_pg"), **more):
    base = {"record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": sequence, "p2p_seq_id": 0}
    base |= {"profiling_name": f"nccl:{name}", "state": "completed" if done else "started", "retired": done}
    base |= {"input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    return base | {"frames": FRAME, "is_p2p": False, "time_created_ns": number} | more


def dump(*entries, version="2.10", ranks="[0, 1, 2]", **more):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": version, "entries": list(entries), "pg_config": config, "pg_status": {}} | more


def write(folder, dumps, how=pickle.dumps, name="nccl_trace_rank_{}"):
    for rank, values in dumps.items():
        data = how(values)
        (folder / name.format(rank)).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def found(folder):
    return [(cause.rank, cause.kind) for cause in diagnose(read(folder)).causes]


WAITING = dump(entry(0), entry(1, sequence=2, done=False))
BEHIND = dump(entry(0))


@pytest.mark.parametrize("how", [pickle.dumps, json.dumps])
@pytest.mark.parametrize("version", ["1.5", "2.4", "2.10"])
def test_who_has_not_started_the_collective_is_named(tmp_path, how, version):
    dumps = {0: WAITING, 1: BEHIND, 2: WAITING}
    folder = write(tmp_path, {rank: one | {"version": version} for rank, one in dumps.items()}, how)
    assert found(folder) == [(1, "busy")]
    said = diagnose(read(folder)).causes[0]
    assert said.where == "after all_reduce number 1 of group default_pg/0, which was started at train.py:7 step"


def test_names_with_an_ending_and_folders_below_are_read(tmp_path):
    (tmp_path / "host").mkdir()
    write(tmp_path / "host", {0: WAITING, 1: BEHIND, 2: WAITING}, json.dumps, "trace_{}.json")
    assert found(tmp_path) == [(1, "busy")]


def test_a_rank_without_a_dump_and_one_with_half_a_dump_are_dead(tmp_path):
    assert found(write(tmp_path, {0: WAITING, 2: WAITING})) == [(1, "dead")]
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(BEHIND)[:40])
    inspection = read(tmp_path)
    assert [(c.rank, c.kind) for c in diagnose(inspection).causes] == [(1, "dead")]
    assert "nccl_trace_rank_1 cannot be read" in inspection.why


def test_members_that_no_dump_names_are_those_that_use_the_group(tmp_path):
    dumps = {rank: one | {"pg_config": {}} for rank, one in {0: WAITING, 1: BEHIND, 2: WAITING}.items()}
    assert found(write(tmp_path, dumps)) == [(1, "busy")]


def test_another_operation_and_other_sizes_are_mismatches(tmp_path):
    other = dump(entry(0), entry(1, "broadcast", 2, done=False))
    assert found(write(tmp_path, {0: WAITING, 1: other, 2: WAITING})) == [(1, "mismatch")]
    larger = dump(entry(0), entry(1, sequence=2, done=False, size=5))
    assert found(write(tmp_path, {0: WAITING, 1: WAITING, 2: larger})) == [(2, "mismatch")]


def test_messages_are_matched_by_the_ranks_of_their_group(tmp_path):
    pair = ("7", "pp")
    config = {"pg_config": {"7": {"name": "7", "desc": "pp", "ranks": "[4, 6]"}}}
    recv = entry(0, "recv 1<-0", done=False, group=pair, is_p2p=True)
    write(tmp_path, {6: dump(recv) | config, 4: dump() | config})
    assert found(tmp_path) == [(4, "busy")]
    sent = entry(0, "send 0->1", done=False, group=pair, is_p2p=True)
    write(tmp_path, {6: dump(recv) | config, 4: dump(sent) | config})
    assert found(tmp_path) == [(4, "slow-link")]


def test_a_buffer_that_has_dropped_entries_counts_messages_from_the_last_that_ended(tmp_path):
    pair = {"group": ("7", "pp"), "is_p2p": True}
    config = {"pg_config": {"7": {"name": "7", "desc": "pp", "ranks": "[0, 1]"}}}
    receives = [entry(90 + n, "recv 1<-0", done=n < 3, **pair) for n in range(4)]
    sends = [entry(70 + n, "send 0->1", **pair) for n in range(9)]
    write(tmp_path, {0: dump(*sends) | config, 1: dump(*receives) | config})
    assert found(tmp_path) == [(0, "busy")]


def test_a_call_that_is_left_out_is_found_by_the_pattern_before_it(tmp_path):
    def steps(*names):
        return [entry(n, name, n + 1, n < len(names) - 1) for n, name in enumerate(names)]

    usual = ["all_reduce", "all_gather", "broadcast", "reduce"] * 2
    pairs = {"ranks": "[0, 1]"}
    write(tmp_path, {0: dump(*steps(*usual, "all_reduce", "all_gather"), **pairs)})
    write(tmp_path, {1: dump(*steps(*usual, "all_reduce", "broadcast"), **pairs)})
    assert found(tmp_path) == [(1, "missing-call")]


class Harmful:
    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_that_wants_to_call_something_is_refused_and_calls_nothing(tmp_path):
    harmful, target = Harmful(), tmp_path / "made"
    harmful.folder = str(target)
    write(tmp_path, {0: {"entries": [harmful], "version": "2.10"}})
    with pytest.raises(UserError, match=r"could be harmful: it asks for posix\.mkdir"):
        read(tmp_path)
    assert not target.exists()


def test_a_folder_without_dumps_or_with_two_of_one_rank_is_refused(tmp_path):
    with pytest.raises(UserError, match="contains no dump"):
        read(tmp_path)
    write(tmp_path, {0: BEHIND})
    write(tmp_path, {0: BEHIND}, json.dumps, "other_{}.json")
    with pytest.raises(UserError, match="both dumps of rank 0"):
        read(tmp_path)
