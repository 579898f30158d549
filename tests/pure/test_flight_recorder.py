"""A dump of torch's flight recorder that is harmful; all others are in ``conversations/traces``."""

import os
import pickle

import pytest

from ft.base.errors import UserError
from ft.observe.diagnose.flight_recorder import read


class Harmful:
    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_that_wants_to_call_something_is_refused_and_calls_nothing(tmp_path):
    harmful, target = Harmful(), tmp_path / "made"
    harmful.folder = str(target)
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [harmful], "version": "2.10"}))
    with pytest.raises(UserError, match=r"could be harmful: it asks for posix\.mkdir"):
        read(tmp_path)
    assert not target.exists()
