"""Draws the loss curve of a run: ``python tools/plot_loss.py --metrics metrics.jsonl --output loss.png``."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ft.base.errors import UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", type=Path, required=True, help="a --metrics-file of pretrain_gpt.py")
    parser.add_argument("--output", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    parser.add_argument("--dataset", help="dataset prefix; its unigram entropy is drawn as a line")
    parser.add_argument("--title", default="Loss per token")
    arguments = parser.parse_args(argv)
    try:
        draw(read_metrics(arguments.metrics), arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read_metrics(path: Path) -> list[dict]:
    """Return the steps of a metrics file; damaged lines are skipped with a message."""
    fix = "give a --metrics-file of pretrain_gpt.py"
    steps = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}", fix) from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            steps.append(values | {"step": values["step"], "loss": values["loss"]})
        except (ValueError, KeyError, TypeError):
            print(f"warning: {path}:{number} is no whole line of a step: left out", file=sys.stderr)
    if not steps:
        raise UserError(f"{path} holds no steps", "train for at least one step")
    return steps


def draw(steps: list[dict], arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], color="#9dbad5", lw=1, label="training")
    validation = [(s["step"], s["validation_loss"]) for s in steps if "validation_loss" in s]
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#c44e52", ms=4, label="validation")
        axes.annotate(
            f"{validation[-1][1]:.2f}", validation[-1], xytext=(0, 8), textcoords="offset points", ha="center"
        )
    if arguments.dataset:
        entropy = unigram_entropy(arguments.dataset)
        axes.axhline(entropy, color="#555555", ls="--", lw=1, label=f"unigram entropy of the corpus, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="nats per token", title=arguments.title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(arguments.output, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"{arguments.output} cannot be written: {error}", "give a writable .png path") from error


def unigram_entropy(prefix: str) -> float:
    from megatron.ft_trainer.data.tokenizer import read_sidecar

    sidecar = read_sidecar(prefix)
    if sidecar is None:
        raise UserError(f"{prefix} has no sidecar with its entropy", "make it with tools/preprocess_data.py")
    return sidecar.unigram_entropy


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
