"""Ends a run at a step boundary that all ranks agree on: after a signal, a time limit or a step."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from ft.state.groups.tree import Tree
from megatron.ft_trainer.arguments.topics import TrainingOptions

REPEAT_S = 2.0


class Exits:
    """Decides whether to end the run after the current step.

    Ranks receive a signal or exceed the time limit at different moments, so they have to agree on the step. ``ask``
    starts an asynchronous all-reduce of two integers over a tree of its own, and ``answer`` waits for the result.
    The optimizer step runs in between and hides the latency.

    Args:
        options: exit flags.
        started: ``time.monotonic()`` at which --exit-duration-in-mins begins to count.

    Attributes:
        signal: name of the signal because of which the run ends, the same on every rank; "" if there is none.
    """

    def __init__(self, options: TrainingOptions, started: float):
        self._options, self._started = options, started
        self._signum: int | None = None
        self._signalled_at = 0.0
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._reason: str | None = None
        self._tree = Tree("EXIT_FLAGS")
        self._previous_handler = None
        self.signal = ""

    def __enter__(self) -> "Exits":
        if self._options.exit_signal_handler:
            self._previous_handler = signal.signal(self._options.exit_signum, self._on_signal)
        return self

    def __exit__(self, *exception) -> None:
        if self._previous_handler is not None:
            signal.signal(self._options.exit_signum, self._previous_handler)

    def end(self, reason: str) -> None:
        """End the run after the current step. Call it in the same step on every rank."""
        self._reason = reason

    def ask(self) -> None:
        """Start to send the other ranks the signals and the time limit that this rank has observed so far."""
        limit = self._options.exit_duration_in_mins
        time_is_up = limit is not None and time.monotonic() - self._started > limit * 60
        seen = torch.tensor([self._signum or 0, time_is_up], dtype=torch.int32, device="cpu")
        self._asked = seen, self._tree.start(seen, dist.ReduceOp.MAX)

    def answer(self, step: int) -> str | None:
        """Return why the run ends after ``step``, or None. The result is the same on every rank."""
        seen, work = self._asked
        work.wait()
        signum, time_is_up = seen.tolist()
        self.signal = signal.Signals(signum).name if signum else ""
        return self._reason or reason_to_exit(self._options, step, signum, bool(time_is_up))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal; a second one ends the process.

        A launcher may forward a signal that Slurm has sent to all processes of a step, so repetitions within REPEAT_S
        seconds count as one.
        """
        now = time.monotonic()
        if self._signum is None:
            self._signum, self._signalled_at = signum, now
        elif now - self._signalled_at > REPEAT_S:
            os._exit(128 + signum)


def reason_to_exit(options: TrainingOptions, step: int, signum: int, time_is_up: bool) -> str | None:
    """Return the reason to end the run after ``step``, or None.

    ``signum``: the exit signal that some rank has received, 0 if none has; ``time_is_up``: on some rank.
    """
    if signum:
        return f"{signal.Signals(signum).name} received"
    if time_is_up:
        return f"{options.exit_duration_in_mins:g} minutes are over (--exit-duration-in-mins)"
    if options.exit_interval and step % options.exit_interval == 0:
        return f"step {step} is a multiple of --exit-interval {options.exit_interval}"
    return None
