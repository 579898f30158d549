"""Training loops of one's own, for tests of what ft.protect accepts: ``ft run ... own_loops.py KIND ...``.

The kinds of the first half are loops in plain torch, and those of the second half are ``examples/own_trainer.py`` with
one part replaced.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import own_trainer as own  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ft  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

STEPS = 6


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def ddp():
    model = DistributedDataParallel(net())
    return model, torch.optim.AdamW(model.parameters())


def fsdp2():
    parallel_state.initialize_model_parallel()
    model = fully_shard(net(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def train_in_torch(make) -> None:
    """Train as a loop in plain torch would: ``make`` returns its model and its optimizer."""
    session = ft.attach()
    session.init_process_group("gloo")
    model, optimizer = make()
    counter = ft.StepCounter()
    protected = ft.protect(session, [model], optimizer, None, counter)

    def work() -> None:
        while counter.step < STEPS:
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(counter.step)
            loss = model(torch.randn(4, 8, generator=draw)).square().mean()
            loss.backward()
            optimizer.step()
            counter.step += 1
            protected.committed()

    protected.run_with_recovery(work)
    session.close()


# --- the example, with another part -----------------------------------------------------------------------------------


def frozen() -> None:
    """Freeze some weights, which a worker that joins later draws differently."""
    wrap, attach, sessions = own.DistributedDataParallel, own.attach, []

    def attached():
        sessions.append(attach())
        return sessions[0]

    def wrapped(config, how, model):
        for name, parameter in model.named_parameters():
            if name.endswith("linear_fc1.bias"):
                parameter.requires_grad_(False).data.fill_(7.0 if sessions[0].joins else 0.5)
        return wrap(config, how, model)

    own.attach, own.DistributedDataParallel = attached, wrapped


def running() -> None:
    """Read batches from one running stream, as from a data loader's iterator, which no recovery moves back."""
    made, count = own.batches, iter(range(10**6))
    own.batches = lambda step: made(next(count))


OF_TORCH = {"ddp": ddp, "fsdp2": fsdp2}
OF_EXAMPLE = {"frozen": frozen, "running": running}


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind in OF_TORCH:
        train_in_torch(OF_TORCH[kind])
    else:
        OF_EXAMPLE[kind]()
        own.main()
