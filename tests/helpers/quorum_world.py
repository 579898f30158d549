"""The quorum server's decision code in virtual time, with replicas played by a test."""

from ft.job.quorum import Limits, Report, reactions
from ft.job.quorum.decide import decide
from ft.job.quorum.state import QuorumOptions, QuorumState


class World:
    """The quorum server without I/O. ``now``: its clock. ``given``: replica -> the last quorum that it got."""

    def __init__(self, replicas=3, term=0, now=0.0, **options):
        limits = Limits(**options.pop("limits", {}))
        self.options = QuorumOptions(replicas, limits=limits, **options).check()
        self.now, self.notes, self.given = now, [], {}
        self.state = QuorumState.begin(self.options, term, now)

    def hello(self, replica, life=0, last=None, steps=0):
        self.notes += reactions.hello(self.state, self.now, replica, life, last, steps)

    def report(self, replica, next_step=0, lineage=-1, life=0, **values):
        last = self.given.get((replica, life))
        number = values.pop("number", last.number if last else 0)
        report = Report(replica, life, next_step, lineage, number=number, **values)
        self.notes += reactions.report(self.state, self.now, report)
        return self.decide()

    def decide(self):
        """Decide as the server does; return the last decision other than to wait, if there is one."""
        result = None
        while True:
            self.notes += reactions.time_passed(self.state, self.now)
            decision = decide(self.state, self.now)
            if decision.quorum is None and not decision.refused:
                return result or decision
            result = decision
            for replica in decision.refused:
                reactions.answered(self.state, replica)
            if decision.quorum is None:
                continue
            for replica in decision.to:
                self.given[replica, decision.quorum.lives[replica]] = decision.quorum
            if decision.is_repeated:
                for replica in decision.to:
                    reactions.answered(self.state, replica)
            else:
                self.notes += reactions.formed(self.state, self.now, decision.quorum, dict(decision.excluded))

    def wait(self, seconds, beating=True):
        """Let time pass in intervals of a heartbeat; replicas that are present send heartbeats."""
        formed, end = None, self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            if beating:
                for replica, one in self.state.replicas.items():
                    if one.phase == "here":
                        reactions.beat(self.state, self.now, replica)
            decision = self.decide()
            formed = decision if decision.quorum or decision.refused else formed
        return formed or decision

    def start(self, step_s=0.1):
        """Start all replicas and put them into the quorum of step 0; return it."""
        for replica in range(self.options.replicas):
            self.hello(replica)
        return [self.report(replica, 0, 0, step_s=step_s) for replica in range(self.options.replicas)][-1].quorum

    def commits(self, quorum, *replicas, step_s=0.1, **values):
        """Let these replicas commit the quorum's step and ask for the next one."""
        for replica in replicas:
            decision = self.report(
                replica, quorum.step + 1, quorum.number, life=quorum.lives[replica], step_s=step_s, **values
            )
        return decision

    def retries(self, quorum, replica, *suspects, step_s=0.1):
        """Let this replica report a failed step: it still has the state from before."""
        return self.report(
            replica, quorum.step, quorum.lineage, life=quorum.lives[replica], suspects=suspects, step_s=step_s
        )

    def lose(self, replica, life=0):
        reactions.lost(self.state, self.now, replica, life)

    def aside(self, replica):
        reactions.aside(self.state, self.now, replica)

    def repairs(self, replica, life=0):
        reactions.repairs(self.state, self.now, replica, life)

    def repaired(self, replica):
        reactions.repaired(self.state, replica)

    def give_up(self, replica, life=0, reason="its input cannot work"):
        self.notes += reactions.given_up(self.state, self.now, replica, life, reason)

    def arriving(self, replica, life):
        self.notes += reactions.arriving(self.state, self.now, replica, life)

    def leave(self, replica, life=0, reason="done"):
        self.notes += reactions.leaves(self.state, self.now, replica, life, reason)

    def events(self, name):
        return [note.values for note in self.notes if note.name == name]
