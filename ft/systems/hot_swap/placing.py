"""Determines for each epoch which workers hold this worker's peer copies (:mod:`ft.state.placement`)."""

import os
from collections.abc import Mapping, Sequence

from ft.base import events
from ft.base.errors import UserError
from ft.protection.training_state import TrainingState
from ft.state.placement.assign import Holders, find_problems, place
from ft.worker.session import Session


class Placing:
    """Places peer copies.

    All workers compute the same placement from the epoch's seats and the previous placement; logical rank 0 reports the
    placement to the user.

    Args:
        k: number of copies of each state.
        strict: whether failure domains that cannot be respected at the start end the run.
    """

    def __init__(self, session: Session, subject: TrainingState, k: int, strict: bool = False):
        self._session, self._subject, self._k, self._strict = session, subject, k, strict
        self._training_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self._reported: list[str] = []

    def begin(self) -> list[int]:
        """Return the holders of this worker's copies at the start of a run. For a worker that joins later, the holders
        are unknown until ``renew``.

        Raises:
            UserError: ``strict`` is set and the placement has problems. Only logical rank 0 raises it; its exit ends
                the run.
        """
        session, subject = self._session, self._subject
        about = {
            "dp_peers": {str(session.rank): subject.dp_peers},
            "shards": {str(session.rank): subject.shards},
            "complete": {str(session.rank): subject.copies_are_complete},
        }
        if session.joins:
            session.observe("layout", **about)
            return []
        holders = place(self._where(), subject.dp_groups, self._k)
        session.observe("layout", **about, copies={str(session.rank): holders[session.rank]})
        problems = self._problems(holders)
        if problems and self._strict:
            raise UserError(
                "--ft-snapshot-strict: peer copies cannot be placed as asked:\n  " + "\n  ".join(problems),
                "change --ft-snapshot-peers, the order of the ranks (--use-tp-pp-dp-mapping) or the nodes",
            )
        self._tell(holders, 0, problems)
        return holders[session.rank]

    def renew(self, before: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the holders of this worker's copies in the session's epoch.

        Args:
            before: logical rank -> its holders up to now, from the repair order.
        """
        session = self._session
        known = {rank: list(held) for rank, held in before.items()}
        holders = place(self._where(), self._subject.dp_groups, self._k, known)
        mine = holders[session.rank]
        if known.get(session.rank) != mine:
            session.observe("layout", copies={str(session.rank): mine})
        moved = sum(holder not in known.get(owner, held) for owner, held in holders.items() for holder in held)
        self._tell(holders, moved, self._problems(holders))
        return mine

    def _where(self) -> dict[int, dict[str, str]]:
        return {rank: {"node": seat.node, **seat.domains} for rank, seat in self._session.seats.items()}

    def _problems(self, holders: Holders) -> list[str]:
        """Return the placement's problems. On a single node, return none unless ``strict``, because the risk is
        obvious.
        """
        if self._session.rank != 0 or (self._training_nodes == 1 and not self._strict):
            return []
        subject = self._subject
        incomplete = () if subject.copies_are_complete else holders.keys()
        return find_problems(self._where(), subject.dp_groups, self._k, holders, incomplete)

    def _tell(self, holders: Holders, moved: int, problems: list[str]) -> None:
        """Report the placement, on logical rank 0; print problems only if they have changed."""
        if self._session.rank != 0:
            return
        copies = {str(owner): held for owner, held in holders.items()}
        self._session.observe(events.COPIES_PLACED, copies=copies, moved=moved, problems=problems)
        for problem in problems if problems != self._reported else []:
            print(f"warning: peer copies: {problem}", flush=True)
        if self._reported and not problems:
            print("peer copies: every failure domain is respected again", flush=True)
        self._reported = problems
