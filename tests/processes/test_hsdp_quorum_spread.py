"""From the leader to all ranks of a replica; and the emulation at scale, at a small one."""

import asyncio
import json
import selectors
import socket
import struct
import time

import pytest

from ft import cli
from ft.job.quorum import wire
from ft.job.quorum.server import Connections
from ft.lab.simulate.quorum.run import Round, rounds
from ft.lab.simulate.quorum.shape import WARM_UP, Job, processes
from ft.lab.simulate.quorum.spread import Relay
from ft.lab.simulate.quorum.table import percentile
from ft.state.groups.tree import Shape

LIMIT_S = 30.0


@pytest.mark.parametrize("nodes", [1, 2, 5, 32, 33, 34, 1024, 1025])
@pytest.mark.parametrize("fan_out", [1, 2, 32])
def test_a_tree_reaches_every_node_once(nodes, fan_out):
    tree = Shape(nodes, fan_out)
    reached = [child for node in range(nodes) for child in tree.children(node)]
    assert reached == list(range(1, nodes))
    assert all(node in tree.children(tree.parent(node)) for node in range(1, nodes)) and tree.parent(0) is None
    assert Shape(1024).depth == 3 and Shape(1).depth == 0 and Shape(17).depth == 1


class Nodes:
    """All relays of a tree in one event loop."""

    def __init__(self, tree, tokens=None):
        loop = asyncio.get_running_loop()
        self.tree, self.got, self.lost = tree, {node: [] for node in range(tree.size)}, []
        self.relays = [
            Relay(loop, (tokens or {}).get(node, "token"), self._taker(node), self.lost.append)
            for node in range(tree.size)
        ]
        self.addresses = {node: self.relays[node].listen("127.0.0.1") for node in self.got if tree.children(node)}
        for node in range(1, tree.size):
            self.relays[node].join(self.addresses[tree.parent(node)])

    def _taker(self, node):
        return lambda body: self.got[node].append(wire.unpack(body)["value"])

    async def until(self, is_so):
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    async def ready(self):
        await self.until(
            lambda: all(one.children == len(self.tree.children(node)) for node, one in enumerate(self.relays))
        )

    def close(self):
        for relay in self.relays:
            relay.close()


def test_what_the_leader_publishes_reaches_all_in_order():
    async def play():
        nodes = Nodes(Shape(40, 3))
        await nodes.ready()
        big = "x" * 3_000_000  # more than a socket takes at once
        for value in (1, big, 3):
            nodes.relays[0].publish({"kind": "quorum", "value": value})
        await nodes.until(lambda: all(len(got) == 3 for got in nodes.got.values()))
        assert all(got == [1, big, 3] for got in nodes.got.values()) and not nodes.lost
        nodes.close()

    asyncio.run(play())


def test_a_node_that_is_lost_is_noticed_on_both_sides_and_the_others_go_on():
    async def play():
        nodes = Nodes(Shape(7, 2))
        await nodes.ready()
        nodes.relays[1].close()
        await nodes.until(lambda: len(nodes.lost) == 3)  # its parent and its two children
        nodes.relays[0].publish({"kind": "quorum", "value": 1})
        await nodes.until(lambda: nodes.got[5] == nodes.got[6] == [1])
        assert nodes.got[3] == nodes.got[4] == []
        nodes.close()

    asyncio.run(play())


def test_a_relay_with_another_token_gets_nothing():
    async def play():
        nodes = Nodes(Shape(3, 2), tokens={2: "another"})
        await nodes.until(lambda: nodes.relays[0].children == 1 and len(nodes.lost) == 1)
        nodes.relays[0].publish({"kind": "quorum", "value": 1})
        await nodes.until(lambda: nodes.got[1] == [1])
        assert nodes.got[2] == [] and "token" in nodes.lost[0]
        nodes.close()

    asyncio.run(play())


# --- ft simulate quorum ----------------------------------------------------------------------------------------------


def test_quorums_are_emulated_with_deaths_and_all_ranks_get_them(capsys):
    words = "simulate quorum --ranks 768 --replicas 3 --node 8 --fan-out 4 --rounds 24 --deaths 2 --json"
    assert cli.main(words.split()) == 0
    said = json.loads(capsys.readouterr().out)
    latency = said["latency_s"]
    assert said["nodes"] == 96 and said["depth"] == 3
    assert latency["death"]["quorums"] >= 1 and latency["return"]["quorums"] >= 1
    assert 0 < latency["none"]["leaders"]["p50"] <= latency["none"]["ranks"]["p50"] <= latency["none"]["ranks"]["p99"]


def test_the_emulation_says_what_is_real(capsys):
    assert cli.main(["simulate", "quorum", "--ranks", "80", "--replicas", "2", "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    assert "80 logical ranks in 2 replicas of 40, over 3 relays each" in said
    assert "multiplexed: the 16 ranks below a relay" in said and "the paper, 98304 ranks" in said


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--ranks 100 --replicas 12", "100 ranks cannot be divided into 12"),
        ("--ranks 0", "--ranks 0"),
        ("--rounds 8 --deaths 2", "2 deaths in 8 rounds"),
        ("--ranks 8 --replicas 1 --deaths 1 --rounds 8", "one replica"),
        ("--ranks 12000000", "descriptors"),
    ],
)
def test_what_cannot_be_emulated(capsys, words, problem):
    assert cli.main(["simulate", "quorum", *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_latencies_are_from_the_last_report_to_the_last_delivery():
    logs = [
        {"replica": 0, "log": [[1, WARM_UP, 1.0, 1.5, 1.7], [2, WARM_UP + 1, 2.0, 2.2, 2.5]]},
        {"replica": 1, "log": [[1, WARM_UP, 1.25, 1.75, 2.25]]},
    ]
    assert list(rounds(logs)) == [
        Round(WARM_UP, 2, 0.5, 1.0, "return"),
        Round(WARM_UP + 1, 1, pytest.approx(0.2), 0.5, "death"),
    ]
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (50, 90, 100)] == [2.0, 4.0, 4.0]


def test_replicas_are_spread_over_the_cores():
    assert 1 <= processes(Job(98304, 12)) <= 12
    assert processes(Job(8, 1)) == 1


# --- strangers --------------------------------------------------------------------------------------------------------


def hang_up(address):
    """Connects, and resets the connection before anybody has taken it."""
    own = socket.create_connection(address, timeout=LIMIT_S)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    own.close()


def test_one_that_hangs_up_before_it_is_taken_in_costs_the_server_nothing_and_those_behind_it_come_in():
    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        connections = Connections(selector, "token")
        hang_up(listener.getsockname())
        with socket.create_connection(listener.getsockname(), timeout=LIMIT_S) as other:
            connections.accept(listener)
            assert len(selector.get_map()) == 1 and other.recv(4) == wire.MAGIC
        connections.close()


def test_one_that_hangs_up_before_it_is_taken_in_costs_a_relay_nothing():
    complaints = []

    async def round_():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        nodes = Nodes(Shape(2))
        hang_up(wire.parse_where(nodes.addresses[0]))
        await nodes.ready()
        nodes.close()

    asyncio.run(round_())
    assert not complaints
