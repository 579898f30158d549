"""Writes the log of a run to the terminal and the metrics file, and sums the run up before its first step.

Only the last rank writes steps, because it is on the last pipeline stage and so has the loss.
"""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ft.record.metrics import MetricsFile
from megatron import patches
from megatron.core import parallel_state
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.arguments.topics import LoggingOptions
from megatron.ft_trainer.model import params_dtype, uses_te


@dataclass
class StepReport:
    """The outcome of one training step, under the names in the metrics file; None for values that were not requested.

    Attributes:
        loss: mean over the step's tokens; NaN on all but the last pipeline stage.
        applied: whether the parameters were updated; the metrics file has the reverse, as ``skipped``.
        of_protections: figures of the run's protections, by name.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    consumed_samples: int
    global_batch_size: int
    applied: bool
    num_zeros: int | None
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    loss_scale: float = 1.0
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
            values = {**asdict(report), **report.of_protections, "skipped": not report.applied}
            values["of_protections"] = values["applied"] = None
            figures = {name: value for name, value in values.items() if value is not None}
            self._metrics.write({**figures, "wall": round(time.time(), 3)})
        self._since_line.append(report)
        self._skipped += not report.applied
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


def startup_summary(options: Options, layout: Layout, parameters: int, tokenizer) -> str:
    """Return a summary of model, data and platform, in a few lines. ``parameters``: those of the whole model."""
    m, t = options.core, options.training
    experts = f", {options.core.num_experts} experts" if options.core.num_experts else ""
    rows = {
        "megatron-core": f"{version('megatron-core')}, torch {torch.__version__}, {_installed('transformer-engine')}, "
        f"{_installed('apex')}",
        "platform": f"{patches.platform().name}, {layout}",
        "layers": "transformer_engine" if uses_te(options) else "local (torch)",
        "model": f"{m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads{experts}, "
        f"{parameters / 1e6:.2f} M parameters, {str(params_dtype(options)).removeprefix('torch.')}",
        "tokenizer": f"{type(tokenizer).__name__}, vocabulary {tokenizer.vocab_size}",
        "batch": f"{t.global_batch_size} samples of {options.data.seq_length} tokens, micro batch {t.micro_batch_size}",
        "length": f"{t.train_iters} steps",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def count_parameters(chunks: list[torch.nn.Module]) -> int:
    """Return the number of parameters of the whole model, each counted once.

    All ranks have to call it, and get the same result.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=torch.cuda.current_device())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for param in (p for chunk in chunks for p in chunk.parameters()):
        if getattr(param, "shared", False):
            continue
        if not getattr(param, "allreduce", True):
            counts[1] += param.numel()
        elif getattr(param, "tensor_model_parallel", False) or tp_rank == 0:
            counts[0] += param.numel()
    torch.distributed.all_reduce(counts[:1], group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(counts[1:], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return int(counts.sum())


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
