"""Conversations about the recovery ladder: where a recovery's state comes from, and which level is taken."""

import ladder_situations
from conversations import Player

from ft.job.control.recovery import HostMemory, Others, Restarts, Seats, Situation, Stages, decide, plan_from_memory
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings


class Ladder(Player):
    """A pipeline of which some ranks are lost; the commands say what the others hold."""

    def do_pipeline(self, pp=4, dp=1, tp=1, blocks=None, checkfree="", rebuilt=None, lends=True, silent=()):
        """Ranks in the order tp, dp, pp, each with its own snapshots of steps 7 and 6, and without copies.

        Args:
            pp, dp, tp: the grid.
            blocks: transformer layers of each stage.
            checkfree: which stages may be rebuilt: "middle", "plus" or none.
            rebuilt: stage -> step at which it was last rebuilt.
            lends: whether ranks give their weights to their data-parallel peers.
            silent: ranks that have not said where they are.
        """
        places = {
            rank: GridPosition(
                rank // (dp * tp), rank % tp, rank // tp % dp, 0, (blocks or [2] * pp)[rank // (dp * tp)], lends=lends
            )
            for rank in range(pp * dp * tp)
        }
        told = {rank: place for rank, place in places.items() if rank not in silent}
        self.stages = Stages(checkfree, told, {int(stage): step for stage, step in (rebuilt or {}).items()})
        parts = {rank: (place.pp, place.tp) for rank, place in places.items()}
        self.peers = {rank: [other for other in parts if parts[other] == part] for rank, part in parts.items()}
        self.held = {rank: Holdings([7, 6]) for rank in places}

    def do_lost(self, *ranks):
        for rank in ranks:
            del self.held[rank]

    def do_steps(self, *steps):
        """All who live hold these steps of their own, and no copies."""
        self.held = {rank: Holdings(list(steps)) for rank in self.held}

    def do_holds(self, rank, *steps, live=None, **copies):
        """A rank holds these steps, and copies (``of1=[7]``: of rank 1; ``whole1=[7]``: with what its peers have, too).

        ``live``: the step of its model.
        """
        whole = {int(key.removeprefix("whole")): held for key, held in copies.items() if key.startswith("whole")}
        of = {int(key.removeprefix("of")): held for key, held in copies.items() if key.startswith("of")}
        self.held[rank] = Holdings(list(steps), of | whole, live, whole)

    def do_copies(self):
        """Each rank that lives holds what the one before it holds, too."""
        for rank, own in self.held.items():
            self.held[rank] = Holdings(own.own, {(rank - 1) % len(self.peers): own.own})

    def do_source(self, unusable=None, **more):
        """Show where the state comes from; ``more``: further fields of the memory, such as ``spoiled``."""
        marked = {int(rank): steps for rank, steps in (unusable or {}).items()}
        return self._plan(plan_from_memory(self._memory(unusable=marked, **more), self.stages))

    def _memory(self, **more) -> HostMemory:
        return HostMemory(list(self.peers), self.held, self.peers, **more)

    def _plan(self, plan) -> list[str]:
        taken = {rank: one for rank, one in plan.sources.items() if (one.owned, one.replicated) != (rank, rank)}
        lines = [f"{plan.name}, step {plan.step}: {plan.reason}"]
        lines += [f"  {rank} takes the state of {one.owned}, {one.replicated}" for rank, one in taken.items()]
        lines += [f"  {rank} is rebuilt from {one.previous}, {one.following}" for rank, one in plan.rebuilt.items()]
        lines += [f"  {rank} takes the weights of {peer}" for rank, peer in plan.lent.items()]
        return lines + [f"  all take the position of {plan.position_of}"] * (plan.position_of is not None)

    def do_decide(self, standbys=None, room=0, replicas=1, reorders=False, restarts=None, unverified=(), **more):
        """Show the level, why those before it are not taken, and what the oracle of random situations finds wrong.

        Args:
            standbys: number of those that are ready; by default as many as there are lost ranks.
            room: number of further workers that nodes have room for.
            replicas: number of replicas of the job.
            reorders: whether the others compute a lost replica's part.
            restarts: fields of the warm restarts; the newest checkpoint is of step 2.
            unverified: snapshots that are not verified, as holder, owner and step.
            more: further fields of the situation.
        """
        vacant = [rank for rank in self.peers if rank not in self.held]
        given = Situation(
            7,
            self._memory(),
            self.stages,
            Seats(vacant, len(vacant) if standbys is None else standbys, room),
            Others(replicas, reorders),
            Restarts(**{"workers": len(self.peers), "checkpoints": [2], **(restarts or {})}),
            unverified={tuple(one) for one in unverified},
            **more,
        )
        found = decide(given)
        lost = f"loses {found.lost.steps} steps" + ", and the run" * found.lost.ended
        lines = [f"{found.level}, {lost}: {' / '.join(found.reason.splitlines())}"]
        lines += [f"  not {level}: {why}" for level, why in found.refused.items()]
        lines += self._plan(found.plan)[1:] if found.plan is not None else []
        return [*lines, *(f"  WRONG: {said}" for said in ladder_situations.broken(given, found))]


PLAYERS = {"ladder": Ladder}
