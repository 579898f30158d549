"""The quorum's decision code in random histories: replicas that die, are cut off, stall and blame each other, servers
that are killed between two answers. What must hold in all of them, and that all come to their end.
"""

import random
from dataclasses import dataclass

import pytest
from quorum_world import World

from ft.job.quorum import NoQuorum, Quorum, Report, reactions
from ft.job.quorum.decide import decide
from ft.job.quorum.state import SPAN

HISTORIES, STEPS, DISTURBED_S, PATIENCE_S = 300, 12, 20.0, 400.0
TICK_S = 0.05
MOST_S = 3000.0


@dataclass
class Player:
    """One replica: a leader with its client, and the model's state as a value that tells different ones apart."""

    life: int = 0
    is_alive: bool = True
    is_connected: bool = False
    has_hello: bool = False
    state: tuple = (0, -1)
    content: object = None
    last: Quorum | None = None
    asking: dict | None = None
    doing: Quorum | None = None
    done_at: float = 0.0
    back_at: float = 0.0
    has_ended: bool = False
    echo: Report | None = None  # a report that is sent a second time over the same connection


class Game:
    """One history."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.count = self.draw.randint(2, 5)
        self.least = self.draw.randint(1, self.count)
        self.players = {replica: Player() for replica in range(self.count)}
        self.quorums, self.results, self.numbers, self.received = {}, {}, [], {}
        self.now, self.term, self.checkpoint = 0.0, -1, ((0, 0), "initial")
        self.serve()

    @property
    def is_disturbed(self):
        return self.now < DISTURBED_S

    def serve(self):
        """A server, in the place of another."""
        self.term += 1
        limits = {"start_s": 30.0, "load_s": 60.0, "stall_s": 40.0, "member_s": 6.0, "minimum_s": MOST_S - 1}
        limits |= {"aside_s": 20.0, "wait_s": self.draw.choice([0.0, 0.1, 2.0]), "ban_most_s": 60.0}
        end = self.world.state.end if self.term else None
        self.world = World(self.count, self.term, self.now, min_replicas=self.least, limits=limits)
        self.world.state.end = end
        for player in self.players.values():
            player.is_connected = False

    def play(self):
        end = DISTURBED_S + PATIENCE_S
        while self.now < end and not all(player.has_ended for player in self.players.values()):
            self.now += TICK_S
            self.world.now = self.now
            for replica, player in self.players.items():
                self.moves(replica, player)
            if self.is_disturbed:
                self.disturb()
            self.server_decides()
        lagging = {replica: player for replica, player in self.players.items() if not player.has_ended}
        assert not lagging, f"at {self.now:.1f}: {lagging}; {self.world.decide().reason}"

    def moves(self, replica, player):
        """What a replica does by itself."""
        if player.has_ended:
            return
        if not player.is_alive:
            if self.now >= player.back_at:
                player.is_alive, player.has_hello = True, True
            return
        if not player.is_connected and self.now >= player.back_at:
            self.connect(replica, player)
        if player.is_connected:
            reactions.beat(self.world.state, self.now, replica)
            if player.echo is not None and self.draw.random() < 0.3:
                self.echoes(player)
        if player.doing is not None and self.now >= player.done_at:
            self.ends_step(replica, player)
        if player.doing is None and player.asking is None and player.is_connected:
            self.asks(replica, player)

    def connect(self, replica, player):
        try:
            self.world.hello(replica, player.life, player.last)
        except NoQuorum as error:
            raise AssertionError(f"{replica}: {error}") from error
        player.is_connected, player.echo = True, None
        if player.asking is not None:
            self.sends(replica, player)

    def asks(self, replica, player, suspects=()):
        player.asking = {
            "suspects": suspects,
            "finished": player.state[0] >= STEPS,
            "number": player.last.number if player.last else 0,
        }
        if player.is_connected:
            self.sends(replica, player)

    def sends(self, replica, player):
        report = Report(replica, player.life, *player.state, step_s=0.5, **player.asking)
        self.world.notes += reactions.report(self.world.state, self.now, report)
        player.echo = report if self.draw.random() < 0.2 else None

    def echoes(self, player):
        report, player.echo = player.echo, None
        self.world.notes += reactions.report(self.world.state, self.now, report)

    # --- the server -------------------------------------------------------------------------------------------------

    def server_decides(self):
        decision = self.decide()
        while decision.quorum is not None:
            quorum, dies = decision.quorum, self.is_disturbed and self.draw.random() < 0.03
            self.check(decision)
            for replica in decision.to:
                if not dies or self.draw.random() < 0.5:
                    self.receives(replica, quorum)
            if dies:
                self.serve()
                return
            if decision.is_repeated:
                for replica in decision.to:
                    reactions.answered(self.world.state, replica)
            else:
                reactions.formed(self.world.state, self.now, quorum, dict(decision.excluded))
            decision = self.decide()
        if self.world.state.pending():
            assert decision.until is not None and self.now < decision.until <= self.now + MOST_S, decision

    def decide(self):
        state = self.world.state
        reactions.time_passed(state, self.now)
        if state.needed_term() > state.term:
            raise AssertionError(f"a number of term {state.needed_term()} in term {state.term}")
        decision = decide(state, self.now)
        assert not decision.refused
        return decision

    def check(self, decision):
        quorum, players = decision.quorum, self.players
        if decision.is_repeated:
            assert quorum == self.quorums[quorum.number]
            return
        assert quorum.number not in self.quorums and quorum.number // SPAN == self.term
        assert not self.numbers or quorum.number > self.numbers[-1]
        self.numbers.append(quorum.number)
        self.quorums[quorum.number] = quorum
        assert quorum.healthy and not set(quorum.healthy) & set(quorum.behind)
        if quorum.finished:
            return
        assert len(quorum.members) >= self.least
        contents = set()
        for replica in quorum.members:
            report = self.world.state.of(replica).report
            assert report.life == quorum.lives[replica]
            is_equal = report.state == (quorum.step, quorum.lineage)
            assert is_equal == (replica in quorum.healthy) and report.state <= (quorum.step, quorum.lineage)
            if is_equal and players[replica].life == report.life:
                contents.add(players[replica].content)
        assert len(contents) <= 1, f"{quorum}: healthy ones differ: {contents}"

    def receives(self, replica, quorum):
        player = self.players[replica]
        is_for = player.is_alive and player.is_connected and player.life == quorum.lives[replica]
        if not is_for or player.asking is None or (player.last and player.last.number >= quorum.number):
            return
        player.asking = None
        if quorum.finished:
            player.has_ended = True
            reactions.leaves(self.world.state, self.now, replica, player.life, "finished")
            return
        player.last = player.doing = quorum
        self.received.setdefault(quorum.number, set()).add(replica)
        player.done_at = self.now + self.draw.uniform(0.3, 0.6)
        if self.is_disturbed and self.draw.random() < 0.02:
            player.done_at += self.draw.uniform(1.0, 15.0)

    # --- steps ------------------------------------------------------------------------------------------------------

    def ends_step(self, replica, player):
        quorum, player.doing = player.doing, None
        if quorum.load:
            (player.state, player.content) = self.checkpoint
            return
        result = self.results.get(quorum.number) or self.results.setdefault(quorum.number, self.run_ring(quorum))
        winners, content = result
        if replica in winners:
            player.state, player.content = (quorum.step + 1, quorum.number), content
            if player.state[0] % 4 == 0 and player.state > self.checkpoint[0]:
                self.checkpoint = (player.state, content)
        elif self.draw.random() < 0.7:
            others = [other for other in quorum.members if self.draw.random() < 0.4]
            self.asks(replica, player, suspects=tuple(others))

    def run_ring(self, quorum):
        """(who carries the step through, the state after it): all members have to be in it; some may fail last."""
        there = self.received[quorum.number] == set(quorum.members) and all(
            self.players[one].is_alive and self.players[one].life == quorum.lives[one] for one in quorum.members
        )
        sources = [one for one in quorum.healthy if self.players[one].state == (quorum.step, quorum.lineage)]
        if not there or not sources or (self.is_disturbed and self.draw.random() < 0.15):
            return set(), None
        content = (quorum.number, self.players[sources[0]].content)
        if self.is_disturbed and self.draw.random() < 0.15:
            return {one for one in quorum.members if self.draw.random() < 0.5}, hash(content)
        return set(quorum.members), hash(content)

    # --- faults -----------------------------------------------------------------------------------------------------

    def disturb(self):
        if self.draw.random() < 0.004:
            self.serve()
        replica = self.draw.choice(list(self.players))
        player, chance = self.players[replica], self.draw.random()
        if not player.is_alive or player.has_ended:
            return
        if chance < 0.01:
            self.kills(replica, player)
        elif chance < 0.02:
            player.is_connected, player.back_at = False, self.now + self.draw.choice([0.02, 0.5, 8.0])
            reactions.lost(self.world.state, self.now, replica, player.life)
        elif chance < 0.025:
            self.world.give_up(replica, player.life - 1, "said long ago")

    def kills(self, replica, player):
        reactions.lost(self.world.state, self.now, replica, player.life)
        if self.draw.random() < 0.8:
            self.world.leave(replica, player.life)
        back = self.now + self.draw.choice([0.3, 1.0, 10.0])
        self.players[replica] = Player(player.life + 1, False, back_at=back)
        if self.draw.random() < 0.8:
            self.world.arriving(replica, player.life + 1)


@pytest.mark.parametrize("first", range(0, HISTORIES, HISTORIES // 3))
def test_in_every_history_all_hold_the_same_state_and_reach_the_end(first):
    for seed in range(first, first + HISTORIES // 3):
        try:
            Game(seed).play()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
