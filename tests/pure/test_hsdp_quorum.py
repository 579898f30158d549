"""Who is in a step of FT-HSDP: the pure decision."""

from quorum_world import World

from ft.job.quorum import Limits, Quorum, Report
from ft.job.quorum.decide import judge
from ft.job.quorum.state import QuorumOptions
from ft.job.quorum.values import committed_in, estimated
from ft.net.codec import from_json, to_json


def test_the_one_that_is_further_stays():
    returned = {0: Report(0, 0, 4, 3, (1,)), 1: Report(1, 0, 5, 9, (0,))}
    quorum = Quorum(9, 4, 3, (0, 1), (), {0: 0, 1: 0})
    assert set(judge(quorum, returned, failed=1, forgiven=1)) == {0}


def test_every_exact_state_of_a_step_goes_before_an_estimate_and_one_estimate_before_another():
    lineages = [77, estimated(77, 0, 3), estimated(estimated(77, 4, 3), 1, 3), estimated(77, 1, 4)]
    reports = [Report(0, 0, 5, lineage) for lineage in lineages]
    older = Report(1, 0, 4, 76)
    assert sorted([older, *reports], key=lambda report: report.state) == [older, *reversed(reports)]
    assert [committed_in(lineage) for lineage in lineages] == [77] * 4
    assert [from_json(Report, to_json(report)) for report in reports] == reports


def test_a_replica_with_an_estimate_is_behind_one_with_the_exact_state():
    world = World(2)
    quorum = world.commits(world.start(), 0, 1).quorum
    world.lose(1)
    world.hello(1, 1, last=quorum)
    world.report(1, 1, estimated(1, 1, 1), 1)
    world.report(0, 1, 1, number=quorum.number)
    found = world.given[0, 0]
    assert (found.healthy, found.behind, found.lineage) == ((0,), (1,), 1)


def test_the_limits_grow_with_the_steps():
    limits = Limits().check()
    assert limits.calibrated(20.0).member_s == limits.member_s + 60.0
    assert limits.calibrated(None).member_s == limits.start_s
    assert QuorumOptions(3).check().min_replicas == 1
