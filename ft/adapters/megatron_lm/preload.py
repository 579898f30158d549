"""Imported by the warm pool of ``ft run`` before workers are forked: imports the checkout and what its script needs.

The pool's command line is that of its workers (:mod:`ft.adapters.megatron_lm.start`).
"""

import contextlib
import importlib
import sys
from pathlib import Path

from ft.adapters.megatron_lm import tree
from ft.adapters.megatron_lm.start import load
from ft.job.agent.preload import imports_of

_LATER = (
    *("megatron.training.datasets.data_samplers", "torch.optim", "ft.adapters.megatron_lm.install"),
    *(f"megatron.core.dist_checkpointing.strategies.{name}" for name in ("state_dict_saver", "torch")),
)
"""Modules that are imported only when a worker first needs them. An import in the middle of training can hold Python's
interpreter lock for so long that the worker's heartbeats stop.
"""


def _import(script: str) -> None:
    load(script)
    own = ["ft.adapters.megatron_lm.gpt"] if Path(script) == tree.SCRIPT else []
    for name in (*imports_of(Path(script).read_text(encoding="utf-8")), *own, *_LATER):
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)


if sys.argv[0] == "ft.adapters.megatron_lm":
    _import(sys.argv[2])
