"""Table and figure of the results of :mod:`hsdp_accuracy`."""

import statistics
from pathlib import Path

import numpy
from hsdp_accuracy import BATCH, COUNTS, FIRST, LINEAR, LONG, NONE, REPLICAS, SEQ, SQRT, STEPS, Setting

RESULTS = "tools/experiments/results/hsdp_accuracy"
WHOLE = REPLICAS * BATCH * SEQ
"""Tokens of a step with all replicas."""
SMOOTH = 15
_COLOUR = {NONE: "#c8322b", LINEAR: "#e8a33d", SQRT: "#3f8f55"}
_BASE, _INK, _QUIET, _FAINT = "#1f2933", "#1f2933", "#66717d", "#dfe4ea"


def write(rows: list[dict], root: Path) -> str:
    """Write the results under ``root``; return the text."""
    text, path = table(rows), root / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text + "\n")
    picture(rows, path.with_suffix(".png"))
    return text


def by_name(rows: list[dict]) -> dict[str, dict[int, dict]]:
    found: dict[str, dict[int, dict]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["seed"]] = row
    return found


def differences(runs: dict[str, dict[int, dict]], name: str) -> list[float]:
    """Return the difference of the last held-out loss to that of the same seed without failures, for each seed."""
    base = runs[Setting().name]
    return [row["held_out"][-1][1] - base[seed]["held_out"][-1][1] for seed, row in sorted(runs[name].items())]


def noise(runs: dict[str, dict[int, dict]]) -> float:
    """Return the standard deviation between runs without failures that read the samples in different orders."""
    found = [d for name in runs if name.startswith("no failures, order") for d in differences(runs, name)]
    return statistics.fmean(d * d for d in found) ** 0.5


def worst_apart(runs: dict[str, dict[int, dict]], name: str) -> float:
    """Return the largest difference of the smoothed training loss to the run without failures, a mean over seeds."""
    base = runs[Setting().name]
    return statistics.fmean(float(numpy.max(numpy.abs(_apart(row, base[seed])[1]))) for seed, row in runs[name].items())


def _apart(row: dict, base: dict) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return (tokens, smoothed training loss minus that of ``base``) after the first part."""
    tokens, loss = _smooth(row)
    at, expected = _smooth(base)
    after = (tokens > FIRST * WHOLE) & (tokens < at[-1])
    return tokens[after], loss[after] - numpy.interp(tokens[after], at, expected)


def _smooth(row: dict) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return (tokens, loss averaged over the tokens of ``SMOOTH`` whole steps, however many replicas took part)."""
    tokens = numpy.array([t for t, _ in row["train"]], dtype=float)
    weight = numpy.diff(tokens, prepend=0.0)
    total = numpy.cumsum(numpy.array([loss for _, loss in row["train"]]) * weight)
    middle = numpy.arange(SMOOTH * WHOLE, tokens[-1], WHOLE / 2)
    return middle - SMOOTH * WHOLE / 2, (
        numpy.interp(middle, tokens, total) - numpy.interp(middle - SMOOTH * WHOLE, tokens, total)
    ) / (SMOOTH * WHOLE)


def table(rows: list[dict]) -> str:
    runs = by_name(rows)
    base, spread = runs[Setting().name], noise(runs)
    last = [row["held_out"][-1][1] for row in base.values()]
    took = sum(row["took_s"] for row in rows)
    lines = [
        "Loss after failures of replicas, with a small model (the question of figures 8 and 9 of the paper).",
        "",
        f"$ python tools/experiments/hsdp_accuracy.py --seeds {len(base)} --report --into FOLDER",
        f"{REPLICAS} replicas x {BATCH} samples of {SEQ} bytes, {STEPS} steps, the first failure after {FIRST}; "
        f"{len(rows)} runs, {took / 60:.0f} min on one busy core",
        "",
        f"Held-out loss without failures: {statistics.fmean(last):.4f} (seeds: {', '.join(f'{x:.4f}' for x in last)}).",
        f"Another order of the samples, no failures, moves it by {spread:.4f} (standard deviation, same seed).",
        "",
        "Difference of the last held-out loss to the same seed without failures, at the same number of tokens: mean",
        "and standard error over the seeds; how many of the standard deviations above that is; and the largest",
        f"difference of the training loss (mean over {SMOOTH} steps) on the way.",
        "",
        f"{'setting':28s}  {'mean':>8s}  {'+-':>7s}  {'in spreads':>10s}  {'largest on the way':>18s}",
    ]
    for name in runs:
        if name == Setting().name:
            continue
        found = differences(runs, name)
        mean = statistics.fmean(found)
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
        away = worst_apart(runs, name)
        lines.append(f"{name:28s}  {mean:+8.4f}  {error:7.4f}  {mean / spread:+10.1f}  {away:18.3f}")
    return "\n".join([*lines, "", *_conclusions(runs, spread)])


def _conclusions(runs: dict[str, dict[int, dict]], spread: float) -> list[str]:
    lines, means = [], {}
    for gone in (1, 3):
        for lr in (NONE, LINEAR, SQRT):
            names = [Setting(count, length, gone, lr).name for count, length in COUNTS]
            found = [d for name in names if name in runs for d in differences(runs, name)]
            if found:
                error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
                mean = f"{statistics.fmean(found):+.4f} +- {error:.4f}"
                means[gone, lr] = statistics.fmean(found)
                lines.append(f"  {gone} away, {lr:6s}  {mean}   ({len(found)} runs)")
    order = sorted((lr for gone, lr in means if gone == 3), key=lambda lr: means[3, lr])
    beyond = [n for n in runs if n[0] == "d" and abs(statistics.fmean(differences(runs, n))) > spread]
    calm = max(worst_apart(runs, name) for name in runs if name.startswith("no failures, order"))
    wild = max(worst_apart(runs, name) for name in runs if name[0] == "d")
    return [
        "All counts and lengths together:",
        *lines,
        "",
        f"Seen: of {sum(name[0] == 'd' for name in runs)} settings these end further off than one spread: "
        f"{', '.join(beyond) or 'none'}.",
        f"With three away the order, lowest loss first, is {', '.join(order)}: here a smaller rate is less progress.",
        f"On the way the most that a setting is off is {wild:.3f}, another order of the samples {calm:.3f}: what",
        "figure 9 shows, more fluctuation with three away and a flatter curve with sqrt, is too small to be seen here.",
        "",
        "What can be said: whether a setting ends within what another order of the samples does to the loss, and",
        f"whether the difference between two ways to scale the rate is larger than its error ({spread:.4f} is one",
        "spread). What can not: anything about models, batches or learning rates of a real size. The model is small",
        "and far from converged; the rate's schedule ends with the run, so that a change of the rate in the last part",
        "acts on the last loss directly; a batch of 8 replicas is 768 tokens. The paper's statement, that failures of",
        "up to three of its replicas leave no lasting mark, is tested here, not proven.",
    ]


def picture(rows: list[dict], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = by_name(rows)
    figure = Figure(figsize=(11.0, 8.0), dpi=90, facecolor="#ffffff", layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subplot_mosaic([["whole", "zoom"], ["end", "end"]], height_ratios=(1.0, 1.1))
    _draw_whole(parts["whole"], runs)
    _draw_zoom(parts["zoom"], runs)
    _draw_end(parts["end"], runs)
    figure.savefig(path, dpi=90, format="png", pil_kwargs={"optimize": True})


def _draw_whole(axes, runs) -> None:
    _plain(axes, f"training loss, longest failures ({LONG} steps), 3 of {REPLICAS} away; mean of seeds")
    for name, colour in [(Setting().name, _BASE)] + [(Setting(2, LONG, 3, lr).name, c) for lr, c in _COLOUR.items()]:
        curves = [_smooth(row) for row in runs.get(name, {}).values()]
        if curves:
            tokens = curves[0][0]
            loss = numpy.mean([numpy.interp(tokens, *curve) for curve in curves], axis=0)
            axes.plot(tokens / 1e3, loss, color=colour, linewidth=1.6, label=name)
    axes.axvline(FIRST * WHOLE / 1e3, color=_FAINT, zorder=0)
    axes.set_xlabel("thousand tokens seen", fontsize=9, color=_QUIET)
    axes.legend(frameon=False, fontsize=8, labelcolor=_QUIET)


def _draw_zoom(axes, runs) -> None:
    seed = min(runs[Setting().name])
    _plain(axes, f"seed {seed}: difference to no failures (mean of {SMOOTH} steps), failures shaded")
    other = runs.get(Setting(other=1).name, {}).get(seed)
    if other is not None:
        axes.plot(*_scaled(_apart(other, runs[Setting().name][seed])), color=_FAINT, linewidth=1.6, label="other order")
    for gone, style in ((1, ":"), (3, "-")):
        for lr in (NONE, SQRT):
            row = runs.get(Setting(2, LONG, gone, lr).name, {}).get(seed)
            if row is not None:
                line = _scaled(_apart(row, runs[Setting().name][seed]))
                axes.plot(*line, style, color=_COLOUR[lr], linewidth=1.4, label=f"{gone} away, {lr}")
                for first, _ in row["failures"] if gone == 3 and lr == NONE else ():
                    span = [row["train"][step - 1][0] / 1e3 for step in (first, min(first + LONG, len(row["train"])))]
                    axes.axvspan(*span, color=_FAINT, alpha=0.5, zorder=0, linewidth=0)
    axes.axhline(0.0, color=_BASE, linewidth=0.8)
    axes.set_xlabel("thousand tokens seen", fontsize=9, color=_QUIET)
    axes.legend(frameon=False, fontsize=8, labelcolor=_QUIET)


def _scaled(curve):
    return curve[0] / 1e3, curve[1]


def _draw_end(axes, runs) -> None:
    spread = noise(runs)
    _plain(axes, "last held-out loss minus that without failures, by seed; grey: one spread of the order of samples")
    axes.axhspan(-spread, spread, color=_FAINT, zorder=0, linewidth=0)
    axes.axhline(0.0, color=_BASE, linewidth=0.8)
    names = []
    for place, (count, length, gone) in enumerate((c, n, gone) for c, n in COUNTS for gone in (1, 3)):
        names.append(f"{count} x {length} steps\n{gone} away")
        for shift, (lr, colour) in zip((-0.22, 0.0, 0.22), _COLOUR.items(), strict=True):
            name = Setting(count, length, gone, lr).name
            if name in runs:
                found = differences(runs, name)
                axes.plot([place + shift] * len(found), found, "o", color=colour, markersize=4, alpha=0.6)
                axes.plot(place + shift, statistics.fmean(found), "_", color=colour, markersize=14, markeredgewidth=2)
    for lr, colour in _COLOUR.items():
        axes.plot([], [], "o", color=colour, label=lr)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, labelcolor=_QUIET, ncols=3, title="learning rate", title_fontsize=8)


def _plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(length=0, pad=6, labelsize=8, labelcolor=_QUIET)
