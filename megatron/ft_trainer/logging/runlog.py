"""Writes the log of a run to the terminal and the metrics file.

Only the last rank writes, because it is on the last pipeline stage and so has the loss.
"""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ft.record.metrics import MetricsFile
from megatron.ft_trainer.arguments.topics import LoggingOptions


@dataclass
class StepReport:
    """The logged values of one step, under their names in the metrics file; None for values that were not requested.

    ``of_protections`` has the figures of the run's protections, by name.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    consumed_samples: int
    global_batch_size: int
    step_time_s: float
    tokens_per_s: float
    loss_scale: float
    skipped: bool
    num_zeros: int | None = None
    validation_loss: float | None = None
    of_protections: dict[str, float] = field(default_factory=dict)


class RunLog(AbstractContextManager):
    """Writes a run's values. On all ranks except the writing one, all methods do nothing.

    Args:
        options: logging flags.
        is_writer: whether this rank writes.
        first_step: number of steps that the run has done before this process started. Lines of later steps are removed
            from an existing metrics file, because these steps are repeated.
        last_step: number of steps of the whole run.
    """

    def __init__(self, options: LoggingOptions, *, is_writer: bool, first_step: int, last_step: int):
        self._options, self._last_step = options, last_step
        self._since_line: list[StepReport] = []
        self._skipped = 0
        self._metrics = None
        if not is_writer:
            self._options = None
            return
        if options.metrics_file:
            self._metrics = MetricsFile(Path(options.metrics_file), first_step, self.line)

    def __exit__(self, *exception) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None

    def rewind(self, step: int) -> None:
        """Go back to ``step``, from which training is repeated: drop the values of later steps."""
        if self._options is None:
            return
        self._since_line = [report for report in self._since_line if report.step <= step]
        if self._metrics is not None:
            self._metrics.rewind(step)

    def step(self, report: StepReport) -> None:
        """Log a finished step."""
        if self._options is None:
            return
        if self._metrics is not None:
            values = {**asdict(report), **report.of_protections, "of_protections": None}
            figures = {name: value for name, value in values.items() if value is not None}
            self._metrics.write({**figures, "wall": round(time.time(), 3)})
        self._since_line.append(report)
        self._skipped += report.skipped
        if report.step % self._options.log_interval == 0 or report.step == self._last_step:
            self.line(iteration_line(self._since_line, self._last_step, self._skipped))
        if report.step % self._options.log_interval == 0:
            self._since_line, self._skipped = [], 0

    def evaluation(self, step: int, name: str, loss: float) -> None:
        """Log an evaluation on ``name`` (validation or test) after ``step``."""
        if self._options is None:
            return
        perplexity = math.exp(min(20.0, loss))
        self.line(f" {name} loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | ")

    def line(self, text: str) -> None:
        """Print one line on the terminal."""
        if self._options is not None:
            print(text, flush=True)


def iteration_line(reports: list[StepReport], last_step: int, skipped: int) -> str:
    """Return Megatron-LM's line for the newest of ``reports``, the steps since the last line, oldest first.

    Time and throughput are averages over all of them. ``skipped``: how many updates among them were skipped.
    """
    now, count = reports[-1], len(reports)
    parts = [
        f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {now.step:8d}/{last_step:8d}",
        f"consumed samples: {now.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {sum(r.step_time_s for r in reports) / count * 1000:.1f}",
        f"tokens/s: {sum(r.tokens_per_s for r in reports) / count:.0f}",
        f"learning rate: {now.lr:.6E}",
        f"global batch size: {now.global_batch_size:5d}",
        f"lm loss: {now.loss:.6E}",
        f"loss scale: {now.loss_scale:.1f}",
    ]
    optional = {
        "grad norm": (now.grad_norm, "{:.3f}"),
        "num zeros": (now.num_zeros, "{}"),
    }
    parts += [f"{name}: {shape.format(value)}" for name, (value, shape) in optional.items() if value is not None]
    parts.append(f"number of skipped iterations: {skipped:3d}")
    return " | ".join(parts) + " |"
