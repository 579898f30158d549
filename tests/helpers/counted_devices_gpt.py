"""pretrain_gpt.py on a machine with as many devices as the variable COUNTED_DEVICES says.

The platform of the CPU accepts any device. Here a worker without a device fails as ``megatron.patches.Platform`` lets
it fail on a machine with GPUs: ``select_device`` raises UserError if the local rank is not below the number of GPUs.
"""

import os
import sys

import pretrain_gpt
from ft.base.errors import UserError
from megatron.patches import Platform


def select_device(self: Platform, local_rank: int) -> None:
    devices = int(os.environ["COUNTED_DEVICES"])
    if local_rank >= devices:
        raise UserError(f"local rank {local_rank} has no GPU: this node has {devices}", "start fewer processes")
    print(f"COUNTED device {local_rank}", flush=True)


if __name__ == "__main__":
    Platform.select_device = select_device
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
