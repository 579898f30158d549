"""The all-reduce of one tensor over the connections of FT-HSDP's ring: in host memory, or staged for a device."""

from collections.abc import Callable

import torch

from ft.state import device as devices
from ft.systems.hsdp.ring import numbers
from ft.systems.hsdp.ring.flow import Flow, head
from ft.systems.hsdp.ring.links import Links
from ft.systems.hsdp.ring.options import RingOptions
from ft.systems.hsdp.ring.poller import Poller
from ft.systems.hsdp.ring.schedule import items
from ft.systems.hsdp.ring.staging import Staged, Staging


class Reducer:
    """Reduces the tensors of a ring, one after another, on the ring's thread.

    Args:
        poller: poller of the ring's thread.
        options: options of the ring.
        pause: waits until a transfer may be possible, or raises Broken.
        moved: called after every iteration that has made progress.
    """

    def __init__(
        self, poller: Poller, options: RingOptions, pause: Callable[[], None], moved: Callable[[], None]
    ) -> None:
        self._poller, self._options, self._pause, self._moved = poller, options, pause, moved
        self._buffers = numbers.Buffers(options.chunk_bytes // 4, options.chunks, options.streams)
        self._stagings: dict[torch.device, Staging] = {}

    def await_ready(self, tensor: torch.Tensor, after: Callable[[], None] | None, look: Callable[[], None]) -> None:
        """Wait until ``tensor`` may be read.

        Args:
            tensor: the tensor that is going to be reduced.
            after: see :meth:`ft.systems.hsdp.ring.ring.Ring.all_reduce`; not None for a tensor on a device.
            look: called again and again while a device has work to do before; it returns soon, or raises.
        """
        if tensor.device.type == "cpu":
            if after is not None:
                after()
            return
        staging = self._staging(tensor.device)
        with staging.on_stream():
            after()
        ready = staging.mark()
        while not ready.query():
            look()

    def reduce(self, tensor: torch.Tensor, scale: float, links: Links, me: int, members: int) -> None:
        """Replace ``tensor`` by the sum over all members times ``scale``.

        Args:
            tensor: the tensor, ready to be read.
            scale: factor by which the sum is multiplied.
            links: connections to both neighbours.
            me: index of this member.
            members: number of members, at least 2.

        Raises:
            Broken: the ring is not usable any more.
            UserError: the left neighbour does another all-reduce.
        """
        options = self._options
        plan = items(tensor.numel(), members, me, options.chunk_bytes // 4, options.chunks)
        begin = head(links.operation, tensor.numel(), numbers.TYPES[tensor.dtype], scale)
        if tensor.device.type == "cpu":
            chunks = numbers.of(tensor, scale, members, options.wide_sums, self._buffers)
        else:
            chunks = Staged(tensor, scale, members, options.wide_sums, self._staging(tensor.device), plan)
        Flow(links, self._poller, self._pause, self._moved).run(begin, plan, chunks)
        while chunks.is_busy:
            chunks.added(wait=True)

    def scale_alone(self, tensor: torch.Tensor, scale: float) -> None:
        """Multiply ``tensor`` by ``scale``: the all-reduce of a ring with one member."""
        if scale == 1:
            return
        if tensor.device.type == "cpu":
            tensor.detach().mul_(scale)
            return
        staging = self._staging(tensor.device)
        with staging.on_stream():
            tensor.detach().mul_(scale)
        staging.mark().synchronize()

    def settle(self, tensor: torch.Tensor, is_over: Callable[[], bool]) -> None:
        """After a failure, wait until no work of this ring on the device of ``tensor`` can touch it any more.

        Args:
            tensor: the tensor whose all-reduce has failed.
            is_over: called again and again meanwhile; returns soon, and whether the wait is to be given up.
        """
        staging = self._stagings.get(tensor.device)
        if staging is None:
            return
        settled = staging.mark()
        while not settled.query() and not is_over():
            pass

    def _staging(self, device: torch.device) -> Staging:
        """Return the staging buffers of a device; they are created with its first tensor."""
        if device not in self._stagings:
            self._stagings[device] = Staging(device, self._options)
        devices.enter(device)
        return self._stagings[device]
