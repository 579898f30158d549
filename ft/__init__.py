"""Fault tolerance for Megatron: five systems on one fault path.

A training script that has its own loop over megatron-core joins a run of ``ft run`` with::

    session = ft.attach()                       # before the process group is made; a standby waits in here
    session.init_process_group("nccl")          # instead of torch.distributed's
    ...                                         # model, optimizer and data as ever
    counter = ft.StepCounter()
    protected = ft.protect(session, model_chunks, optimizer, scheduler, counter)

    def work():
        while counter.step < steps:
            train_step(counter.step)            # data by the number of the step: a step may be asked for again
            counter.step += 1
            protected.committed()

    protected.run_with_recovery(work)
    session.close()
"""

__version__ = "0.1.0"

_PUBLIC = {
    "attach": "ft.worker.session",
    "is_attachable": "ft.worker.session",
    "protect": "ft.systems.hot_swap.layer",
    "StepCounter": "ft.protection.position",
}


def __getattr__(name: str):
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
