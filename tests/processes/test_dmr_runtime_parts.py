"""Parts of DMR's runtime by themselves: what comparisons have shown, the state to go back to."""

import pytest
import torch

from ft.protection.undo import Undo
from ft.state.snapshot.state import RankState
from ft.systems.dmr.digest import digest
from ft.systems.dmr.plan.trace import FORWARD
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import AT_ONCE, MESSAGE, Findings
from ft.systems.dmr.runtime.segments import RecomputationSteps, Segment

SEED = 1234567


def at(operator: str = "mm", index: int = 0) -> OperatorCall:
    return OperatorCall(operator, FORWARD, 0, 2, 3, index)


@pytest.fixture
def findings() -> Findings:
    return Findings(torch.device("cpu"), SEED)


def test_equal_pairs_are_no_finding(findings):
    odd = torch.tensor([float("nan"), -0.0, 1.0])
    findings.pair(at(), AT_ONCE, [odd, torch.empty(0)], [odd.clone(), torch.empty(0)])
    assert not findings.flag().item()
    assert findings.settle() == []


def test_a_difference_is_counted_in_elements(findings):
    x = torch.zeros(4, 5)
    y = x.clone()
    y[1, 2], y[3, 0] = -0.0, 7
    findings.pair(at(), AT_ONCE, [x, x], [x, y])
    assert findings.flag().item() == 1
    (found,) = findings.settle()
    assert (found.elements, found.of, found.how) == (2, 20, AT_ONCE)
    assert str(found) == "mm in the forward of microbatch 2, layer 3, compared with at once, 2 of 20 elements differ"
    assert found.values()["operator"] == "mm" and found.values()["elements"] == 2


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)])
def test_another_shape_or_type_is_a_difference(findings, other):
    findings.pair(at(), AT_ONCE, [torch.zeros(4)], [other])
    (found,) = findings.settle()
    assert found.elements is None and "against" in found.note


def test_rows_of_tables_are_held_against_each_other(findings):
    places = [(at(index=i), MESSAGE) for i in range(300)]
    ours, theirs = findings.rows(), findings.rows()
    assert ours.table().shape == (0, 2)
    tensors = [torch.full((3,), float(i)) for i in range(300)]
    for i, tensor in enumerate(tensors):
        ours.add(tensor)
        theirs.add(tensor if i not in (7, 128, 299) else tensor + 1)
    assert ours.count == 300
    assert torch.equal(ours.table()[200].flatten(), digest(tensors[200], SEED).flatten())
    findings.tables(places, ours.table(), ours.table().clone())
    assert not findings.flag().item()
    findings.tables(places, ours.table(), theirs.table())
    assert findings.flag().item() == 1
    assert [one.at.index for one in findings.settle()] == [7, 128, 299]
    assert len(findings.settle()) == 3, "what is settled is not told twice"
    findings.restart()
    assert not findings.flag().item()
    assert findings.settle() == []


def test_early_stopping_leaves_the_rest_unverified(findings):
    names = ("mm", "add", "native_layer_norm", "mm")
    for count, unverified in ((3, 1), (0, 5)):
        segment = Segment(findings, RecomputationSteps())
        for index, name in enumerate(names):
            segment.primary(at(name, index), [torch.tensor([index])])
        segment.begin_again()
        for index, name in enumerate(names[:count]):
            segment.is_extra(name)
            segment.again(at(name, index), [torch.tensor([index])])
        segment.end_again()
        assert (findings.flag().item(), findings.unverified) == (0, unverified)


class Trainee:
    """Parameters that an update changes, and a step count beside them, as in ``ft.protection.training_state``."""

    def __init__(self):
        self.owned = {"moment": torch.randn(64)}
        self.replicated = {"weight": torch.randn(8, 8), "bias": torch.randn(3).bfloat16()}
        self.steps, self.published, self.abandoned = 7, 0, 0

    def state(self, position: dict) -> RankState:
        envelope = {"steps": self.steps, "position": position}
        return RankState(
            dict(self.owned), dict(self.replicated), envelope, {"rng": torch.get_rng_state().numpy().tobytes()}
        )

    def abandon_step(self) -> None:
        self.abandoned += 1

    def apply(self, state: RankState) -> dict:
        self.steps = state.envelope["steps"]
        torch.set_rng_state(torch.frombuffer(bytearray(state.blobs["rng"]), dtype=torch.uint8))
        return state.envelope["position"]

    def publish_parameters(self) -> None:
        self.published += 1


class Place:
    def __init__(self):
        self.samples = 40

    def get(self) -> dict:
        return {"samples": self.samples}

    def set(self, position: dict) -> None:
        self.samples = position["samples"]


def undone(undo: Undo, trainee: Trainee, place: Place) -> int:
    """Take a step and undo it: everything is as it was before. Return the bytes that the copy took."""
    tensors = [*trainee.owned.values(), *trainee.replicated.values()]
    before = [tensor.clone() for tensor in tensors]
    undo.begin()
    undo.wait()
    taken, drawn = undo.nbytes, torch.rand(5)
    for tensor in tensors:
        tensor.mul_(1.5).add_(1)
    trainee.steps, place.samples = 99, 99
    undo.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert torch.equal(drawn, torch.rand(5)) and (trainee.steps, place.samples) == (7, 40)
    return taken


def test_everything_is_as_it_was_before_the_step():
    trainee, place = Trainee(), Place()
    undo = Undo(trainee, place)
    for attempt in range(3):
        undone(undo, trainee, place)
        assert (trainee.published, trainee.abandoned) == (attempt + 1, attempt + 1)
    trainee.owned["moment"] = torch.randn(128)
    undone(undo, trainee, place)  # a state of another shape is kept as well
    undo.close()


class Kept:
    """A copy that another layer keeps of some steps."""

    def __init__(self):
        self.tensors, self.waited = None, 0

    def take(self, sections) -> None:
        self.tensors = {n: {k: t.clone() for k, t in tensors.items()} for n, tensors in sections.items()}

    def is_current(self) -> bool:
        return self.tensors is not None

    def wait(self) -> None:
        self.waited += 1

    def write_back(self, sections) -> None:
        for name, tensors in sections.items():
            for key, tensor in tensors.items():
                tensor.copy_(self.tensors[name][key])


def test_a_copy_that_another_layer_keeps_is_used_while_it_is_current():
    trainee, place, kept = Trainee(), Place(), Kept()
    undo = Undo(trainee, place)
    undo.share(kept)
    for is_kept in (False, True, False):
        kept.tensors = None
        if is_kept:
            kept.take(trainee.state(place.get()).sections())
        assert (undone(undo, trainee, place) == 0) == is_kept == bool(kept.waited)
        kept.waited = 0
    undo.close()
