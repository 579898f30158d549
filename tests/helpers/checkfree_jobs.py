"""Training jobs with CheckFree or CheckFree+ on a rank of a test, without ``ft run``."""


def assemble(flags: str):
    """Return the job of ``flags``, and the replicas of embedding and output layer, None without CheckFree+."""
    import time

    import torch.distributed as dist

    from ft.protection.stack import Protections
    from ft.systems.checkfree.layer import SwappedEnds
    from megatron import patches
    from megatron.ft_trainer import pretrain
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel
    from megatron.ft_trainer.trainer import JobTrainer

    options = parse(flags)
    protections = Protections.of(options.fault_tolerance, {})
    if protections.features:
        patches.apply(*protections.features)
    layout = check(options, dist.get_world_size(), has_te=False)
    swapped = next((each for each in protections if isinstance(each, SwappedEnds)), None)
    if swapped is not None:
        swapped.connected(None)  # the other protections need a session
    init_model_parallel(options.core, layout)
    job = pretrain.assemble(options, layout, time.monotonic(), protections)
    return job, None if swapped is None else swapped.layer(JobTrainer(job), ()).ends


class Keeper:
    """The stage rebuilder of a job, and its position; ``told``: the events that it has logged, (name, detail)."""

    def __init__(self, job, doubles=None):
        from types import SimpleNamespace

        import torch.distributed as dist

        from ft.protection.training_state import TrainingState
        from ft.systems.checkfree.rebuilder import PositionWithNorms
        from megatron.ft_trainer.trainer import JobPosition

        self.job, self._doubles, self.told = job, doubles, []
        observe = lambda name, **detail: self.told.append((name, detail))  # noqa: E731
        self._session = SimpleNamespace(rank=dist.get_rank(), observe=observe)
        self.subject = TrainingState(job.trainee.chunks, job.trainee.optimizer, job.trainee.scheduler)
        self.rebuilder = self.another()
        self.position = PositionWithNorms(JobPosition(job), self.rebuilder)

    def another(self):
        """Return a new rebuilder, as a worker has it that begins from a checkpoint."""
        from ft.systems.checkfree.layer import settings_of
        from ft.systems.checkfree.rebuilder import CheckFreeRebuilder
        from megatron.ft_trainer.trainer import JobTrainer

        settings = settings_of(self.job.options.fault_tolerance, JobTrainer(self.job), self._doubles)
        return CheckFreeRebuilder(self._session, self.subject, settings)
