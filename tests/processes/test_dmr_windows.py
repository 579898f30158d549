"""Each wait for communication is one window, whoever waits."""

import pytest
import torch
import torch.distributed as dist


class Listener:
    """Notes which calls arrive, in their order."""

    is_active = True

    def __init__(self):
        self.calls = []

    def communicates(self, kind, *_args, **_details):
        self.calls.append(f"begins {kind}")
        return kind

    def communicated(self, begun):
        self.calls.append(f"ended {begun}")

    def completed(self, tensors):
        self.calls.append("completed")

    def window(self, kind):
        self.calls.append(f"window {kind}")

    def dynamic_window(self, is_over):
        assert is_over() in (True, False)
        self.calls.append("window of unknown length")

    def waited(self):
        self.calls.append("waited")


def all_reduce(is_asynchronous: bool):
    return dist.all_reduce(torch.ones(4), async_op=is_asynchronous)


def all_gather(is_asynchronous: bool):
    from megatron.core.tensor_parallel import layers

    return layers.dist_all_gather_func(torch.empty(8), torch.ones(4), async_op=is_asynchronous)


def reduce_scatter(is_asynchronous: bool):
    from megatron.core.tensor_parallel import mappings

    return mappings.dist_reduce_scatter_func(torch.empty(2), torch.ones(4), async_op=is_asynchronous)


def all_to_all(is_asynchronous: bool):
    return dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=is_asynchronous)


OPERATIONS = {each.__name__: each for each in (all_reduce, all_gather, reduce_scatter, all_to_all)}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.on_ranks(2)
def test_a_wait_is_a_window_also_if_the_caller_computes_before_it(name):
    from megatron import patches
    from megatron.patches import double_execution
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    found = []
    for is_asynchronous in (False, True):
        listener = Listener()
        double_execution.listen(listener)
        handle = OPERATIONS[name](is_asynchronous)
        if handle is not None:
            listener.calls.append("computes")
            handle.wait()
            handle.wait()
        found.append(listener.calls)
    double_execution.listen(None)
    window = "window of unknown length" if name == "all_to_all" else "window tp"
    at_once, later = found
    assert at_once == [f"begins {name}", window, "waited", f"ended {name}"], found
    assert later == [f"begins {name}", "computes", window, "waited", f"ended {name}"], found


@pytest.mark.on_ranks(2)
def test_waits_within_a_wait_are_one_window():
    from megatron import patches
    from megatron.patches import double_execution
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    from megatron.patches.double_execution import _window

    listener = Listener()
    double_execution.listen(listener)
    handles = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    listener.calls.clear()
    with _window(lambda: listener.window("dp")):  # as around ``finish_grad_sync``
        for handle in handles:
            handle.wait()
    double_execution.listen(None)
    assert listener.calls == ["window dp", "ended all_reduce", "ended all_reduce", "waited"], listener.calls
