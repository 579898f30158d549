"""The rendezvous address (MASTER_ADDR and MASTER_PORT) for scripts that make their own process group."""

from ft.job.agent.environment import Place
from ft.job.agent.uplink import Uplink
from ft.job.messages import Master, MasterChosen
from ft.platform import network


class Masters:
    """One rendezvous address per life of the run: processes of the previous life may still hold the old port.

    The agent that has logical rank 0 chooses the address, and the control plane passes it on to the others.
    """

    def __init__(self, place: Place, uplink: Uplink):
        self._place, self._uplink = place, uplink
        self._known: dict[int, tuple[str, int]] = {}

    def find(self, number: int, ranks: list[int]) -> tuple[str, int] | None:
        """Return (host, port) for restart ``number``, None while it is not known.

        ``ranks``: logical ranks of this agent.
        """
        if number not in self._known and 0 in ranks:
            self._known[number] = (self._place.host, network.free_port())
            if len(ranks) < self._place.world_size:
                self._uplink.post(MasterChosen(number, *self._known[number]))
        return self._known.get(number)

    def known(self, number: int) -> tuple[str, int]:
        """Return the address for standbys, which do not need it: port 0 if it is not known."""
        return self._known.get(number, (self._place.host, 0))

    def learn(self, answer: Master) -> None:
        self._known[answer.number] = (answer.host, answer.port)
