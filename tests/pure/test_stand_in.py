"""Which place of a lost node a standby node takes."""

import json
from pathlib import Path

import pytest
from waiting import eventually

from ft.base.errors import UserError
from ft.job.replicas import marks, policy, stand_in
from ft.job.replicas.places import parts_of
from ft.job.replicas.stand_in import LauncherPlace, Lookout
from ft.platform import election
from ft.platform.election import LeaseRecord


class Run:
    """Files of a run with two replicas of two nodes and one standby node, which is a part of replica 0."""

    def __init__(self, folder: Path):
        self.folder = folder
        for replica in range(2):
            (folder / f"replica-{replica}").mkdir()
        self.counts = [0] * 5
        parts = {place: parts_of(place, 5, 1, 2, 1) for place in range(5)}
        replicas_of = {place: [part.replica for part in parts[place]] for place in range(4)}
        self.lookout = Lookout(folder, parts[4], 4, replicas_of)

    def beat(self, *places: int) -> None:
        for place in places:
            self.counts[place] += 1
            folder = stand_in.folder_of(self.folder, place)
            folder.mkdir(parents=True, exist_ok=True)
            election.renew(folder, LeaseRecord(0, 0, "", f"n{place}", 1, self.counts[place]))

    def says(self, replica: int, phase: str, nodes: list[str], count: int) -> None:
        """The control plane of a replica has written its status and renewed its lease."""
        folder = self.folder / f"replica-{replica}"
        seats = {str(rank): {"node": node} for rank, node in enumerate(nodes)}
        (folder / "status.json").write_text(json.dumps({"phase": phase, "seats": seats}))
        election.renew(folder, LeaseRecord(0, 0, "there", nodes[0], 1, count))


def test_a_standby_node_takes_the_place_of_a_node_of_another_replica(tmp_path):
    run, taken = Run(tmp_path), []
    for second in range(30):
        run.beat(0, 1, 2, *([3] if second < 5 else []))
        run.says(0, "running", ["n0", "n1"], second)
        run.says(1, "running" if second < 7 else "gathering", ["n0", "n1"], second)
        taken.append(run.lookout.look(float(second)))
    assert taken.index(3) in range(9, 16) and set(taken[taken.index(3) :]) == {3}


def test_a_standby_node_whose_workers_train_stays(tmp_path):
    run = Run(tmp_path)
    for second in range(30):
        run.beat(1, 2)
        run.says(0, "running", ["n1", "n2"], second)  # its own replica has lost node 0, and uses this one, n2
        run.says(1, "gathering", ["n0", "n1"], second)
        assert run.lookout.look(float(second)) is None


def test_a_replica_whose_control_plane_is_gone_does_not_train(tmp_path):
    run = Run(tmp_path)
    run.says(0, "running", ["n0", "n1"], 0)
    run.says(1, "running", ["n0", "n1"], 0)  # the file stays as it is
    taken = []
    for second in range(30):
        run.beat(0, 1, *([2, 3] if second < 5 else []))
        run.says(0, "running", ["n0", "n1"], second)
        taken.append(run.lookout.look(float(second)))
    assert taken[4] is None and taken[-1] in (2, 3)
    marks.put(tmp_path, 0, policy.ENDS[0])
    assert run.lookout.look(31.0) is None, "the run is ending"


def test_a_launcher_whose_place_was_taken_finds_out_and_cannot_come_back_to_it(tmp_path):
    first, standby = LauncherPlace(tmp_path, "n1", 1), LauncherPlace(tmp_path, "n2", 2)
    try:
        first.begin()
        standby.begin()
        assert standby.move(1) and standby.number == 1
        eventually(lambda: first.is_lost)
        assert not standby.is_lost
        first.close()
        with pytest.raises(UserError, match="the place of node 1 is held by n2"):
            LauncherPlace(tmp_path, "n1", 1).begin()
    finally:
        first.close()
        standby.close()
