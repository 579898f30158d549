"""Saves and restores a rank's random number generators: those of Python, numpy, torch, the device and megatron-core."""

import random
import struct

import numpy
import torch

from ft.base.errors import UserError
from megatron.core.tensor_parallel import random as core_random

_PYTHON = struct.Struct("<I625I?d")
_NUMPY = struct.Struct("<iid")
_TRACKER = "rng/tracker/"


def blobs() -> dict[str, bytes]:
    """Return the states of all generators as byte strings, by name.

    Raises:
        UserError: numpy's global generator is not of numpy's default type (MT19937).
    """
    version, words, gauss = random.getstate()
    held = numpy.random.get_state(legacy=False)
    if (kind := held["bit_generator"]) != "MT19937":
        raise UserError(f"numpy's global generator is a {kind}", "leave it as numpy makes it: snapshots hold MT19937")
    found = {
        "rng/python": _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0),
        "rng/numpy": _NUMPY.pack(held["state"]["pos"], held["has_gauss"], held["gauss"])
        + held["state"]["key"].tobytes(),
        "rng/torch": _bytes(torch.get_rng_state()),
        "rng/device": _bytes(torch.cuda.get_rng_state()),
    }
    for name, state in core_random.get_cuda_rng_tracker().get_states().items():
        found[_TRACKER + name] = _bytes(core_random.convert_cuda_rng_state(state, to_graphable=False))
    return found


def restore(found: dict[str, bytes]) -> None:
    """Restore the states that :func:`blobs` returned."""
    version, *words, has_gauss, gauss = _PYTHON.unpack(found["rng/python"])
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    position, has_gauss, cached = _NUMPY.unpack_from(found["rng/numpy"])
    keys = numpy.frombuffer(found["rng/numpy"][_NUMPY.size :], dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(_tensor(found["rng/torch"]))
    torch.cuda.set_rng_state(_tensor(found["rng/device"]))
    tracker = core_random.get_cuda_rng_tracker()
    graphable = core_random.is_graph_safe_cuda_rng_tracker(tracker)
    states = {name.removeprefix(_TRACKER): _tensor(blob) for name, blob in found.items() if name.startswith(_TRACKER)}
    tracker.set_states(
        {name: core_random.convert_cuda_rng_state(state, to_graphable=graphable) for name, state in states.items()}
    )


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)
