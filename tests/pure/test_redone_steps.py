"""The comparison of a step that is done again after a recovery with its first try."""

import pytest
import torch

from ft.systems.hot_swap.redone import Tries, digest


class Loop:
    """A loop over a small model whose forward passes are watched."""

    def __init__(self):
        self.model = torch.nn.Linear(4, 1, bias=False)
        self.tries = Tries([self.model])

    def forward(self, *batches: float) -> None:
        for batch in batches:
            self.model(torch.full((2, 4), batch))

    def commit(self, step: int, *batches: float, norm: float = 1.0) -> list[str]:
        self.forward(*batches)
        self.tries.updated((True, norm, 0))
        return self.tries.committed(step)


def test_a_step_that_is_done_again_alike_is_no_difference():
    loop = Loop()
    assert loop.commit(1, 1.0, 2.0) == loop.commit(2, 3.0, 4.0) == []
    loop.forward(5.0)
    loop.tries.recovers(1, is_exact=True)
    assert loop.commit(2, 3.0, 4.0) == loop.commit(3, 5.0, 6.0) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batches": (3.0, 9.0)}, ["1 of 2 forward passes read other batches, the first of them pass 2", "outputs"]),
        ({"norm": 2.0}, ["the norm of the gradients was 1.0, and 2.0 when done again"]),
        ({"weights": 2.0}, ["the outputs (losses) of forward pass 1 summed up to "]),
    ],
)
def test_what_differs_is_named(changed, says):
    loop = Loop()
    loop.commit(1, 1.0, 2.0)
    loop.commit(2, 3.0, 4.0)
    loop.tries.recovers(1, is_exact=True)
    with torch.no_grad():
        loop.model.weight *= changed.get("weights", 1.0)
    found = loop.commit(2, *changed.get("batches", (3.0, 4.0)), norm=changed.get("norm", 1.0))
    assert len(found) == len(says) and all(text in clause for text, clause in zip(says, found, strict=True)), found


def test_an_interrupted_try_is_compared_as_far_as_it_came():
    loop = Loop()
    loop.commit(1, 1.0)
    loop.forward(2.0)
    loop.tries.closes(0, "a worker died")
    loop.forward(7.0)  # what follows the end of the epoch may be wrong
    loop.tries.recovers(1, is_exact=True)
    loop.tries.recovers(1, is_exact=True)  # a failure during the recovery
    assert loop.commit(2, 8.0, 3.0)[0].startswith("1 of 1 forward passes")


def test_an_estimated_state_is_not_compared():
    loop = Loop()
    loop.commit(1, 1.0)
    loop.commit(2, 2.0)
    loop.tries.recovers(1, is_exact=False)
    assert loop.commit(2, 5.0) == []


def test_evaluations_are_not_part_of_a_step():
    loop = Loop()
    with torch.no_grad():
        loop.forward(1.0)
    assert loop.tries._present.batches == []


@pytest.mark.parametrize("size", [1, 5, 1024, 5000, 300_000])
def test_a_digest_depends_on_values_and_their_order(size):
    tensor = torch.arange(size) * 7
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(tensor + 1)
    assert size == 1 or digest(tensor) != digest(tensor.flip(0))
    odd = tensor.to(torch.uint8)[1:]
    assert digest(odd) == digest(odd.clone())
