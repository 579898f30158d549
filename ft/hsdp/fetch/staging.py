"""Host memory for tensors on a device: what is asked for is copied there once a step, whoever asks for it.

Tensors in host memory are passed through. The copy runs on a stream of its own, behind what had been queued when the
state was offered: kernels of the step that follows only read the state, and are not waited for.
"""

from collections.abc import Callable, Mapping

import torch


class Staging:
    """Page-locked copies, allocated once and used again for the next step."""

    def __init__(self):
        self._copies: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}

    def prepare(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]:
        """Notes how far each device is now; what it returns makes tensors in host memory of those given to it."""
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type not in ("cpu", "meta")}
        if not devices:
            return _as_they_are
        marks = {}
        for device in devices:
            marks[device] = torch.Event(device)
            marks[device].record(torch.accelerator.current_stream(device))
        return lambda given: self._copy(given, marks)

    @torch.no_grad()
    def _copy(
        self, tensors: Mapping[str, torch.Tensor], marks: Mapping[torch.device, torch.Event]
    ) -> dict[str, torch.Tensor]:
        for device, mark in marks.items():
            stream = self._streams.setdefault(device, torch.Stream(device))
            stream.wait_event(mark)
        host = {}
        for name, tensor in tensors.items():
            if tensor.device not in marks:
                host[name] = tensor
                continue
            with self._streams[tensor.device]:
                host[name] = self._room(name, tensor).copy_(tensor.detach(), non_blocking=True)
        for device in marks:
            self._streams[device].synchronize()
        return host

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._copies.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copies[name] = room
        return room


def _as_they_are(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return tensors
