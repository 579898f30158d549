"""Where the processes of a script meet that makes its own process group (MASTER_ADDR and MASTER_PORT)."""

from ft.job.agent.environment import Place
from ft.job.agent.uplink import Uplink
from ft.job.messages import Master, MasterChosen
from ft.platform import network


class Masters:
    """One meeting place per life of the run: a port that the dead may still hold is of no use to the next life.

    The agent that has logical rank 0 chooses, the others are told.
    """

    def __init__(self, place: Place, uplink: Uplink):
        self._place, self._uplink = place, uplink
        self._known: dict[int, tuple[str, int]] = {}

    def find(self, number: int, ranks: list[int]) -> tuple[str, int] | None:
        """(host, port) of restart ``number``, None while it is not known; ``ranks``: those of this agent's workers."""
        if number not in self._known and 0 in ranks:
            self._known[number] = (self._place.host, network.free_port())
            if len(ranks) < self._place.world_size:
                self._uplink.post(MasterChosen(number, *self._known[number]))
        return self._known.get(number)

    def known(self, number: int) -> tuple[str, int]:
        """As ``find`` for workers who will not need it: standbys."""
        return self._known.get(number, (self._place.host, 0))

    def learn(self, answer: Master) -> None:
        self._known[answer.number] = (answer.host, answer.port)
