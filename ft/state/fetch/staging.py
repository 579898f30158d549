"""Staging of a state in host memory: tensors on a device are copied to the host at most once per step, for all readers.

The state server (:mod:`ft.state.fetch.server`) uses it to send the training state to other replicas. Tensors that are
in host memory are not copied. The copy runs on its own stream and starts after the work that was queued when the state
was offered. It does not wait for the kernels of the following step, because they only read the state. The page-locked
memory returns to torch's pool when the offer ends.
"""

from collections.abc import Callable, Mapping

import torch

from ft.state import device as devices

Tensors = Mapping[str, torch.Tensor]
ToHost = Callable[[Tensors, Callable[[], bool]], Tensors]
"""Function (tensors, is_over) -> the same tensors in host memory.

As soon as ``is_over()`` is True, it returns early with incomplete content.
"""

_CHUNK = 64 << 20
"""Bytes that are copied between two calls of ``is_over``; a withdrawal waits for one such chunk at most."""


def prepare(tensors: Tensors) -> ToHost:
    """Record an event on each device's current stream. Return a function that copies the tensors after these events."""
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type not in ("cpu", "meta")}
    if not devices:
        return lambda given, is_over: given
    marks = {device: torch.Event(device) for device in devices}
    for device, mark in marks.items():
        mark.record(torch.accelerator.current_stream(device))
    return lambda given, is_over: _copy(given, marks, is_over)


@torch.no_grad()
def _copy(tensors: Tensors, marks: Mapping[torch.device, torch.Event], is_over: Callable[[], bool]) -> Tensors:
    streams = {}
    for device, mark in marks.items():
        devices.enter(device)
        streams[device] = torch.Stream(device)
        streams[device].wait_event(mark)
    host = {}
    for name, tensor in tensors.items():
        if tensor.device not in marks:
            host[name] = tensor
            continue
        host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        source, target = (t.detach().view(-1).view(torch.uint8) for t in (tensor, host[name]))
        for start in range(0, source.numel(), _CHUNK):
            if is_over():
                return host
            with streams[tensor.device]:
                target[start : start + _CHUNK].copy_(source[start : start + _CHUNK], non_blocking=True)
            streams[tensor.device].synchronize()
    return host
