"""Fault injection in a training process: which faults are planned for this rank, and where in a step they occur."""

from collections.abc import Callable

import torch

from ft.base import events
from ft.faults.faults import Fault
from ft.faults.phases import middle_module, plant
from ft.faults.worker import Actions, Injector
from ft.protection.training_state import TrainingState
from ft.worker.session import Session
from megatron.patches import instances

_TOP_MANTISSA_BIT = {torch.float32: (torch.int32, 1 << 22), torch.bfloat16: (torch.int16, 1 << 6)}
_TOP_MANTISSA_BIT[torch.float16] = (torch.int16, 1 << 9)


def make_injector(session: Session, actions: Actions) -> Injector:
    """Return an injector of the faults that are planned for this worker's logical rank and have not occurred yet."""

    def announce(fault: Fault) -> None:
        where = fault.phase if fault.step is not None else "time"
        session.observe(events.FAULT_INJECTED, number=fault.number, kind=fault.kind, where=where, fault=str(fault))

    return Injector.from_environment(session.rank, session.node, session.fired, announce, actions)


def plant_phases(injector: Injector, subject: TrainingState, step: Callable[[], int]) -> None:
    """Install the injection points inside forward, backward and gradient reduction, where a fault is planned there."""
    plant(injector, subject.chunks, step)
    if not injector.has("reduce"):
        return

    def finalize_with_faults(finalize, *args, **kwargs):
        injector.at("reduce", step())
        return finalize(*args, **kwargs)

    instances.around(subject.chunks[0].config, "finalize_model_grads_func", finalize_with_faults)


@torch.no_grad()
def corrupt_tensor(subject: TrainingState, fault: Fault) -> None:
    """Change one element in the middle of the largest weight of the module in the middle of the model."""
    module = middle_module(subject.chunks[0])
    weight = max(module.parameters(), key=torch.numel).data.view(-1)
    place = weight[weight.numel() // 2 : weight.numel() // 2 + 1]
    if fault.value == "nan":
        place.fill_(float("nan"))
    else:
        kind, bit = _TOP_MANTISSA_BIT[weight.dtype]
        place.view(kind).bitwise_xor_(bit)
