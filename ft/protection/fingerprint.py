"""Fingerprint of a run: the properties that determine which operators a step executes, and when it waits.

A DMR plan (dual modular redundancy, SpareTrain) determines when each operator of a step is executed a second time. The
fingerprint is stored in the plan, and a run with another fingerprint refuses the plan.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from megatron import core
from megatron.patches import platform


def fingerprint(
    settings: Mapping[str, Any], *, tp: int, pp: int, vpp: int, dp: int, ep: int, micro_batch: int, global_batch: int
) -> dict[str, str | int]:
    """Return the fingerprint of a run on this machine: property -> value.

    Args:
        settings: all other settings that determine the operators, by name; the fingerprint has their digest, "model".
        tp: tensor-parallel size.
        pp: number of pipeline stages.
        vpp: number of model chunks per stage.
        dp: data-parallel size.
        ep: expert-parallel size.
        micro_batch: samples in a microbatch.
        global_batch: samples in a step, after a batch-size ramp.
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "model": hashlib.sha256(text.encode()).hexdigest()[:16],
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "dp": dp,
        "ep": ep,
        "micro_batch": micro_batch,
        "microbatches": global_batch // (micro_batch * dp),
        "torch": torch.__version__.split("+")[0],
        "core": core.__version__,
        "device": torch.cuda.get_device_name() if platform().name == "cuda" else "cpu",
    }
