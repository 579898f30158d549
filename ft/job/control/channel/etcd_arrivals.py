"""Reordering buffer for the reports that agents write to etcd: it delivers them in the order of their numbers."""

import contextlib
from collections.abc import Mapping

from ft.job.control.channel import Posted
from ft.job.control.channel.etcd_keys import Keys, unpack
from ft.job.control.channel.etcd_wire import Entry
from ft.job.messages import BadMessage, decode


class Arrivals:
    """Delivers every report once, and none before the report with the previous number from the same agent.

    The previous report may be missing because another user of etcd has deleted it; its agent will write it again. Of
    heartbeats, only those that are newer than the last one are delivered.

    Args:
        keys: key names and signatures of the channel.
        taken: agent -> number of its last recorded report.
    """

    def __init__(self, keys: Keys, taken: Mapping[str, int]):
        self._keys = keys
        self._next = {node: number + 1 for node, number in taken.items()}
        self._early: dict[str, dict[int, str]] = {}
        self._beats: dict[str, int] = {}

    def take(self, entry: Entry) -> list[Posted]:
        """Return the reports that can be delivered now that ``entry`` was read.

        Nothing is returned for entries of other kinds and for entries without a valid signature.
        """
        kind, node, number = self._keys.split(entry.key)
        text = self._keys.read(entry.key, entry.value) if kind in ("report", "beat") else None
        if text is None:
            return []
        if kind == "beat":
            return self._beat(node, text)
        early = self._early.setdefault(node, {})
        if number >= self._next.setdefault(node, 1):
            early[number] = text
        found = []
        while (following := self._next[node]) in early:
            self._next[node] += 1
            found += _posted(node, following, early.pop(following))
        return found

    def _beat(self, node: str, text: str) -> list[Posted]:
        count, report = unpack(text)
        if count <= self._beats.get(node, -1):
            return []
        self._beats[node] = count
        return _posted(node, 0, report)


def _posted(node: str, number: int, text: str) -> list[Posted]:
    with contextlib.suppress(BadMessage):
        return [Posted(node, number, decode(text))]
    return []
