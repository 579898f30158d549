"""The CUDA device of a thread: every thread that calls CUDA selects its device here before.

A new thread's current device is GPU 0, whatever device the thread that starts it has selected. A CUDA call in such a
thread creates a context of this process on GPU 0, which takes some 500 MB there, for every process of the node.
"""

import torch

_of_process: torch.device | None = None


def select(index: int) -> None:
    """Select CUDA device ``index`` for the calling thread, and as the device of this process."""
    global _of_process
    _of_process = torch.device("cuda", index)
    torch.cuda.set_device(index)


def enter(device: torch.device | None) -> None:
    """Select ``device`` for the calling thread; nothing is done for None and for devices other than CUDA's."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for copies beside training, of high priority.

    torch has 32 streams of each priority and hands them out in turn. NCCL takes some of normal priority for each epoch,
    so that one of them would come to share this stream, and a reduction would wait for copies.
    """
    return torch.cuda.Stream(device, priority=-1)


def enter_process() -> None:
    """Select the device of this process for the calling thread; nothing is done if :func:`select` was not called."""
    enter(_of_process)
