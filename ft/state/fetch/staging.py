"""Staging in host memory for tensors on a device: a state is copied to the host at most once per step, for all readers.

Tensors in host memory are passed through. The copy runs on its own stream and starts after the work that was queued
when the state was offered. It does not wait for the kernels of the following step, because they only read the state.
The page-locked memory returns to torch's pool when the offer ends.
"""

from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]
ToHost = Callable[[Tensors, Callable[[], bool]], Tensors]
"""(tensors, whether to stop) -> the same tensors in host memory. Returns early, with incomplete content, once it is to
stop.
"""

_CHUNK = 64 << 20
"""Bytes that are copied between two checks whether to stop; a withdrawal waits for one such chunk at most."""


def prepare(tensors: Tensors) -> ToHost:
    """Record the present position of the devices' streams; return a function that copies the tensors after that
    position.
    """
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type not in ("cpu", "meta")}
    if not devices:
        return lambda given, is_over: given
    marks = {device: torch.Event(device) for device in devices}
    for device, mark in marks.items():
        mark.record(torch.accelerator.current_stream(device))
    return lambda given, is_over: _copy(given, marks, is_over)


@torch.no_grad()
def _copy(tensors: Tensors, marks: Mapping[torch.device, torch.Event], is_over: Callable[[], bool]) -> Tensors:
    streams = {device: torch.Stream(device) for device in marks}
    for device, mark in marks.items():
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
