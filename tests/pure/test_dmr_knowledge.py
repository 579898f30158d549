"""What the ranks agree on about functions that are executed as a whole."""

import pickle

from ft.systems.dmr.runtime.opaque import Knowledge, agree


def seen(*, changed=(), forward=(("out",),), again=(("out",),), same=(True,)):
    """Return the knowledge of a rank that has called the function once per entry."""
    notes = Knowledge(is_pure=not changed)
    for paths in forward:
        notes.made_in_forward(paths)
    for is_same in same:
        notes.was_called_again(is_same)
    for paths in again:
        notes.made_again(paths)
    return notes


def test_a_function_waits_for_its_recomputation_only_if_that_holds_on_all_ranks():
    assert agree([{"f": seen()}, {"f": seen()}])["f"].can_wait
    assert not agree([{"f": seen()}, {"f": seen(changed=["history"])}])["f"].can_wait
    assert not agree([{"f": seen(same=[False])}, {"f": seen()}])["f"].can_wait
    assert not agree([{"f": seen(forward=(), again=())}])["f"].can_wait, "it was not called in a segment"


def test_a_rank_that_has_not_called_it_has_no_say():
    agreed = agree([{"f": seen()}, {}, {"g": seen(changed=["x"])}])
    assert agreed["f"].can_wait and not agreed["g"].can_wait


def test_one_call_of_another_function_at_its_place_is_enough_and_stays():
    assert not agree([{"f": seen(same=[True, False, True])}])["f"].is_recomputed


def test_what_is_compared_is_what_every_forward_pass_makes():
    known = agree([{"f": seen(forward=[("a", "b"), ("a", "c")])}, {"f": seen(forward=[("a", "b")])}])["f"]
    assert known.in_forward == {"a"}
    assert not agree([{"f": seen(again=[("out",)])}])["f"].keeps_more
    assert agree([{"f": seen()}, {"f": seen(again=[("out", "saved")])}])["f"].keeps_more


def test_it_can_be_sent_and_compared():
    assert pickle.loads(pickle.dumps(seen())) == seen()
