"""Describes a node for the checks at the start of a run: its versions, addresses, and paths of the command line."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ft.job.agent.options import Cluster, Script
from ft.job.control.start_checks import MISSING, OUTPUT, THERE
from ft.platform import network

_INPUTS = (
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path"),
    *("--data-args-path", "--load", "--pretrained-checkpoint", "--tokenizer-model", "--vocab-file", "--merge-file"),
)
_OUTPUTS = ("--save",)
_ENDINGS = ("", ".bin", ".idx")
"""A data set is given by the beginning of the names of its two files."""


def describe(cluster: Cluster, script: Script) -> dict[str, Any]:
    """Return the fields of ``AgentJoined`` that say how this node is set up; takes a part of a second."""
    from ft.platform.versions import versions

    return {
        "machine": socket.gethostname(),
        "interfaces": network.interfaces(),
        "about": {**versions(), "--nnodes": str(cluster.nnodes), "--standby-nodes": str(cluster.standby_nodes)},
        "paths": paths(script.args),
        "clock": time.time(),
    }


def paths(words: Sequence[str]) -> dict[str, str]:
    """Return the paths of a command line, each with its flag, and whether this node has them.

    For a folder that the run writes, it is the folder above that is looked for: the run creates the folder itself.
    """
    outputs = {value for flag, value in _values(words) if flag in _OUTPUTS}
    found = {}
    for flag, value in _values(words):
        if flag in _INPUTS and value not in outputs and not _is_number(value):
            found[f"{flag} {value}"] = THERE if any(os.path.exists(value + end) for end in _ENDINGS) else MISSING
        elif flag in _OUTPUTS:
            above = os.path.dirname(os.path.abspath(value))
            found[f"{OUTPUT}{flag} {value}"] = THERE if os.path.isdir(above) else MISSING
    return found


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) for the values of the flags that name paths; some flags have several values."""
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if equals:
                yield flag, value
        elif flag in (*_INPUTS, *_OUTPUTS):
            yield flag, word


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
