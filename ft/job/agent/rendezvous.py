"""The rendezvous address (MASTER_ADDR, MASTER_PORT) that ``ft run`` gives to scripts with their own process groups."""

from ft.job.agent.environment import NodeContext
from ft.job.agent.uplink import Uplink
from ft.job.messages import Master, MasterChosen
from ft.platform import network


class Masters:
    """The rendezvous addresses, one for each warm restart of the run.

    A warm restart ends all workers and starts new ones; it needs a new port, because old processes may still hold the
    old one. The agent (supervisor process) of the node with logical rank 0 chooses the address. The control plane
    passes it on to the other agents.
    """

    def __init__(self, place: NodeContext, uplink: Uplink):
        self._place, self._uplink = place, uplink
        self._known: dict[int, tuple[str, int]] = {}

    def find(self, number: int, ranks: list[int]) -> tuple[str, int] | None:
        """Return (host, port) for restart ``number``, None while it is not known.

        Args:
            number: number of the warm restart, 0 for the first start.
            ranks: logical ranks of this agent's workers. If rank 0 is among them, this call chooses the address.
        """
        if number not in self._known and 0 in ranks:
            self._known[number] = (self._place.host, network.free_port())
            if len(ranks) < self._place.world_size:
                self._uplink.post(MasterChosen(number, *self._known[number]))
        return self._known.get(number)

    def known(self, number: int) -> tuple[str, int]:
        """Return (host, port) for standbys, which do not use the address: port 0 if it is not known."""
        return self._known.get(number, (self._place.host, 0))

    def learn(self, answer: Master) -> None:
        self._known[answer.number] = (answer.host, answer.port)
