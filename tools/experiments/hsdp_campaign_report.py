"""Table and figure of the runs of :mod:`hsdp_campaign`."""

import statistics
from pathlib import Path

RESULTS = "tools/experiments/results/hsdp_campaign"


def write(runs: list[dict], root: Path) -> str:
    """Write the results under ``root``; return the table."""
    text = table(runs)
    path = root / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(text)
    picture(runs, path.with_suffix(".png"))
    return text


def by_kind(runs: list[dict]) -> dict[str, list[dict]]:
    """Return kind -> its faults in all runs, the most frequent kind first."""
    found: dict[str, list[dict]] = {}
    for run in runs:
        for fault in run["faults"]:
            found.setdefault(fault["kind"], []).append(fault)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def table(runs: list[dict]) -> str:
    """Return the table as text for a terminal."""
    seeds = [run["seed"] for run in runs]
    faults = [fault for run in runs for fault in run["faults"]]
    wrong = [run for run in runs if run["problems"]]
    lines = [
        f"python tools/experiments/hsdp_campaign.py --seeds {min(seeds)}..{max(seeds)} --report --into FOLDER",
        "",
        f"{len(faults)} faults in {len(runs)} runs of 3 replicas of 2 ranks; "
        f"runs that were sound: {len(runs) - len(wrong)}, not: {len(wrong)}",
        "stall: of the others, beyond a normal step; back: until the replica contributes again (the last one, of "
        "several)",
        "",
        f"{'fault':28} {'count':>5} {'no stop':>8} {'left':>5} {'reload':>7} "
        f"{'stall s':>9} {'worst':>7} {'back s':>9} {'worst':>7}",
    ]
    for kind, some in by_kind(runs).items():
        stall, back = [f["stall_s"] for f in some], [f["back_s"] for f in some if f["back_s"] is not None]
        counts = [sum(not f["left"] for f in some), sum(f["left"] for f in some), sum(f["reload"] for f in some)]
        lines.append(
            f"{kind:28} {len(some):5} {counts[0] or '':>8} {counts[1] or '':>5} {counts[2] or '':>7} "
            f"{_two(stall)} {_two(back)}"
        )
    lines += ["", *(f"seed {run['seed']}: {'; '.join(run['problems'])}\n    {run['inject']}" for run in wrong)]
    return "\n".join(lines).rstrip() + "\n"


def _two(seconds: list[float]) -> str:
    if not seconds:
        return f"{'-':>9} {'-':>7}"
    return f"{statistics.median(seconds):9.2f} {max(seconds):7.2f}"


def picture(runs: list[dict], path: Path) -> None:
    """Draw the stall and the time until the replica is back by kind: dots on a logarithmic axis, medians as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {kind: [f for f in some if f["left"]] for kind, some in by_kind(runs).items()}
    order = sorted((kind for kind in rows if rows[kind]), reverse=True)
    figure, axes = pyplot.subplots(figsize=(8.5, 0.27 * len(order) + 1.6), dpi=100)
    shown = (("stall_s", -0.15, "#c8322b", "stall of the others"), ("back_s", 0.15, "#2b6cb0", "until it is back"))
    for name, shift, colour, label in shown:
        for place, kind in enumerate(order):
            seconds = [max(0.01, f[name]) for f in rows[kind] if f[name] is not None]
            axes.scatter(seconds, [place + shift] * len(seconds), s=16, color=colour, alpha=0.6, linewidths=0)
            if seconds:
                middle = statistics.median(seconds)
                axes.vlines(middle, place + shift - 0.18, place + shift + 0.18, color=colour, linewidth=1.4)
        axes.scatter([], [], s=16, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_xlabel("seconds")
    axes.set_title(f"{sum(map(len, rows.values()))} injected faults that cost a replica", fontsize=10)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    axes.grid(axis="x", color="#dfe4ea", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
