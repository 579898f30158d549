"""A training job in the ranks of a test, whose steps can be undone and repeated with another kind of DMR."""

import time
from pathlib import Path
from types import SimpleNamespace

from msgspec import structs


def assemble(flags: str, has_te: bool = False):
    """Build a job of the trainer, with DMR's patches applied. Call it in an initialized process group. ``has_te``:
    whether flags that need Transformer Engine are accepted, because something was planted in its place."""
    import torch.distributed as dist

    from ft.protection.stack import Protections
    from megatron import patches
    from megatron.ft_trainer import pretrain
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    options = parse(f"{flags} --ft-dmr naive")
    layout = check(options, dist.get_world_size(), has_te=has_te)
    init_model_parallel(options.core, layout)
    return pretrain.assemble(options, layout, time.monotonic(), Protections.of(options.fault_tolerance, {}))


def protection(job, way: str | Path, unstable: Path | None = None):
    """Install DMR on ``job`` and return it. ``way``: "naive", "piggyback", or a plan file. ``unstable``: a file of
    operators that are left unverified."""
    from ft.protection.contract import Asked
    from ft.systems.dmr.layer import DoubleExecution
    from megatron.ft_trainer.trainer import JobTrainer

    ways = (None, way) if isinstance(way, Path) else (way, None)
    asked = {"ft_dmr_unstable": unstable, "ft_dmr_retries": 2, "ft_dmr_inject": []}
    flags = SimpleNamespace(ft_dmr=ways[0], ft_dmr_plan=ways[1], **asked)
    verification = DoubleExecution(Asked(flags, {})).layer(JobTrainer(job), ())
    follow(job, verification)
    return verification


def follow(job, layer) -> None:
    """Route every step of ``job`` through ``layer``: double execution, or its profiler."""
    from ft.protection.stack import Stack

    job.protection, job.verified = Stack([layer]), True
    job.protection.protect(job.trainee.optimizer)


def plan_of(job, folder: Path, budget: float = 1e9) -> Path:
    """Profile steps of ``job``, which are undone, and write a plan; return its file. Collective; ends the job's DMR.

    The plan is made as if deferring an operator cost nothing: otherwise models this small would defer few operators."""
    import torch.distributed as dist

    from ft.systems.dmr.plan.file import read_trace, write_plan
    from ft.systems.dmr.plan.planner import plan
    from ft.systems.dmr.profile.session import ITERATIONS, install
    from megatron.ft_trainer.trainer import JobTrainer

    again, path, trainer = Again(job), folder / "plan.json", JobTrainer(job)
    trainer.end = lambda reason: None
    follow(job, install(folder / "profile.json", trainer))
    for _ in range(ITERATIONS):
        again.step()
    if dist.get_rank() == 0:
        trace = read_trace(folder / "profile.json")
        ops = tuple(structs.replace(op, defer_us=0.0) for op in trace.ops)
        write_plan(path, plan(structs.replace(trace, ops=ops), budget))
    dist.barrier()
    return path


class Again:
    """Runs a step of a job, returns its results, and restores the state from before it."""

    def __init__(self, job):
        from ft.protection.training_state import TrainingState
        from ft.protection.undo import Undo
        from megatron.ft_trainer.trainer import JobPosition

        self._job, self._position = job, JobPosition(job)
        self._subject = TrainingState(job.trainee.chunks, job.trainee.optimizer, job.trainee.scheduler)
        self._undo = Undo(self._subject, self._position)

    def step(self) -> SimpleNamespace:
        """Return ``loss``, ``grad_norm``, and ``state``: a digest of parameters, optimizer, generators, schedule and
        buffers."""
        from megatron.ft_trainer.loop import train_step

        self._undo.begin()
        self._undo.wait()
        report = train_step(self._job)
        left = SimpleNamespace(loss=report.loss, grad_norm=report.grad_norm, state=self._state())
        self._undo.roll_back()
        return left

    def _state(self) -> str:
        import hashlib

        import torch

        from ft.state.snapshot.state import pack_meta

        state = self._subject.state(self._position.get())
        found = hashlib.sha256(pack_meta(state.envelope, state.blobs))
        tensors = [tensor for section in state.sections().values() for tensor in section.values()]
        tensors += [param for chunk in self._job.trainee.chunks for param in chunk.parameters()]
        for tensor in tensors:
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()
