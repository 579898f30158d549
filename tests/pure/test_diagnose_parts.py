"""How values differ, and where a rank is, against slow definitions of both; and the order of causes of crashes."""

import math
import random

import pytest
import torch
from planted_crashes import SEGFAULT, USERS

from ft.faults import first_cause as causes
from ft.faults.first_cause import CrashError, first_cause
from ft.observe.diagnose import compare
from ft.observe.diagnose.compare import coordinates, copies, of_tensors
from ft.record import crash

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def _ordered(bits: int, width: int) -> int:
    """A floating-point number's place in the order of all, zero being both zeros' place."""
    sign, magnitude = bits >> (width - 1), bits & ((1 << (width - 1)) - 1)
    return -magnitude if sign else magnitude


def _tensor(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(x.to_bytes(dtype.itemsize, "little") for x in bits)), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differences_are_those_of_the_definition(dtype, monkeypatch, seed):
    chance = random.Random(seed)
    monkeypatch.setattr(compare, "_BLOCK", 7)
    width = 8 * dtype.itemsize
    for _ in range(20):
        a = [chance.randrange(1 << width) for _ in range(chance.randint(1, 40))]
        b = [x if chance.random() < 0.6 else chance.choice([x ^ 1, chance.randrange(1 << width)]) for x in a]
        raw = [_tensor(values, dtype) for values in (a, b)]
        found = of_tensors(*raw)
        at = [i for i in range(len(a)) if a[i] != b[i]]
        if not at:
            assert found is None
            continue
        ours, theirs = (each.double().tolist() for each in raw)
        sound = [i for i in at if math.isfinite(ours[i]) and math.isfinite(theirs[i])]
        assert (found.elements, found.differing, found.first, found.last) == (len(a), len(at), at[0], at[-1])
        assert found.not_finite == len(at) - len(sound)
        ulp = max((abs(_ordered(a[i], width) - _ordered(b[i], width)) for i in sound), default=None)
        assert found.ulp == (None if ulp is None else min(ulp, 2**63 - 1))
        assert found.absolute == max((abs(ours[i] - theirs[i]) for i in sound), default=None)
        mask = 0
        for i in at:
            mask |= a[i] ^ b[i]
        assert found.mask == mask


def test_places_are_those_of_megatron_core():
    from megatron.core.parallel_state import RankGenerator

    sizes = [(tp, cp, ep, dp, pp) for tp in (1, 2) for cp in (1, 2) for ep in (1, 2) for dp in (2, 4) for pp in (1, 3)]
    for tp, cp, ep, dp, pp in sizes:
        for pipeline_first in (False, True):
            order = "tp-cp-ep-pp-dp" if pipeline_first else "tp-cp-ep-dp-pp"
            world = tp * cp * dp * pp
            layout = {"world_size": world, "tp": tp, "cp": cp, "ep": ep, "etp": 1, "dp": dp, "pp": pp, "vpp": None}
            dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
            expert = RankGenerator(tp=1, ep=ep, dp=tp * cp * dp // ep, pp=pp, cp=1, order=order)
            if dense.get_ranks("pp") != expert.get_ranks("pp"):
                continue  # megatron-core refuses it
            for generator, name, token in (
                *((dense, name, name) for name in ("tp", "cp", "dp", "pp")),
                *((expert, name, token) for name, token in (("ep", "ep"), ("edp", "dp")) if ep > 1),
            ):
                for group in generator.get_ranks(token):
                    places = [coordinates(rank, layout, pipeline_first)[name] for rank in group]
                    assert places == list(range(len(group))), (layout, pipeline_first, name)
            for group in dense.get_ranks("dp-cp"):
                assert [group[0], *copies(group[0], layout, pipeline_first, False)] == sorted(group)
            if ep > 1:
                for group in expert.get_ranks("dp"):
                    assert [group[0], *copies(group[0], layout, pipeline_first, True)] == sorted(group)


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", range(len(causes.CAUSES + causes.CONSEQUENCES) - 1))
def test_every_class_of_errors_comes_before_the_next_one_whatever_the_clocks_say(earlier):
    first, second = (causes.CAUSES + causes.CONSEQUENCES)[earlier : earlier + 2]
    errors = [
        CrashError("n0.w1", "n0", 1, observed=second, told="b", when=1.0),
        CrashError("n0.w0", "n0", 0, observed=first, told="a", when=2.0),
    ]
    assert first_cause(errors).cause.kind == first == first_cause(reversed(errors)).cause.kind


def test_cut_off_logs_do_no_harm():
    for end in range(len(USERS)):
        crash.parse(USERS[:end])
        crash.parse(USERS + "\nDuring handling of the above exception, another exception occurred:\n" + USERS[:end])
        crash.parse(SEGFAULT[:end])
