"""The result table of ``dmr_detection.py``: bit flips by operator, and their outcomes."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

TABLE = "tools/experiments/results/dmr_detection.txt"
_FOUND = ("found", "error")
_COMMAND = "python tools/experiments/dmr_detection.py --case NAME ... --clean NAME ... --report --into FOLDER"
_KINDS = ("primary", "checker", "forward", "recompute", "backward", "optimizer")


def write(folder: Path, root: Path) -> str:
    """Write the table of all results in ``folder`` into the repository at ``root``; return it."""
    flips = [json.loads(path.read_text()) for path in sorted(folder.glob("flips-*.json"))]
    clean = [json.loads(path.read_text()) for path in sorted(folder.glob("clean-*.json"))]
    text = "\n".join([_head(flips), *_cases(flips), "", *_operators(_all(flips)), "", *_clean(clean)]) + "\n"
    (root / TABLE).write_text(text)
    return text


def _all(results: Sequence[dict]) -> list[dict]:
    return [flip for result in results for flip in result["flips"] if flip["outcome"] != "nothing hit"]


def _head(results: Sequence[dict]) -> str:
    flips = _all(results)
    count = Counter(flip["outcome"] for flip in flips)
    unmasked = len(flips) - count["masked"]
    found = sum(count[name] for name in _FOUND)
    types = Counter(flip["dtype"] for flip in flips)
    operators = len({flip["operator"] for flip in flips})
    return (
        f"{_COMMAND}\n\n{len(flips)} flipped bits, {unmasked} of them not masked: {found} found by DMR "
        f"({found / unmasked:.2%}),\n{count['ended']} ended their iteration with an error before DMR looked, "
        f"{unmasked - found - count['ended']} missed.\n"
        f"{operators} operators; results of type {', '.join(f'{name} {n}' for name, n in types.most_common())}.\n"
        f"Iterations without a flip in between: {sum(result['false_alarms'] for result in results)} alarms.\n"
    )


def _cases(results: Sequence[dict]) -> list[str]:
    lines = [
        f"{'run':22} {'ranks':>5} {'way':9} {'results':>7} "
        f"{'flips':>6} {'found':>6} {'error':>6} {'ended':>6} {'masked':>6} {'missed':>6} {'in windows':>10}"
    ]
    for result in results:
        count = Counter(flip["outcome"] for flip in _all([result]))
        total = count.total()
        missed = total - count["found"] - count["error"] - count["masked"] - count["ended"]
        lines.append(
            f"{result['case']:22} {result['world']:5} {result['way']:9} {result['results']:7} {total:6} "
            f"{count['found']:6} {count['error']:6} {count['ended']:6} {count['masked']:6} {missed:6} "
            f"{sum('window' in flip.get('how', ()) for flip in result['flips']):10}"
        )
    flags = [f"{result['case']}: {_waits(result)}{' '.join(result['flags'])}" for result in results]
    results_are = "results: of operators and messages in one iteration of all ranks"
    return [*lines, results_are, "in windows: flips of operators whose other execution was compared there", "", *flags]


def _waits(result: dict) -> str:
    alone, in_segments = result.get("waits", (0, 0))
    ended = "the last flip, not counted, ended a rank with an exception; " if result.get("ended") else ""
    waiting = f"{alone} operators wait alone, {in_segments} in AGC segments; " if alone + in_segments else ""
    return ended + waiting


def _operators(flips: Sequence[dict]) -> list[str]:
    by_name: dict[str, list[dict]] = defaultdict(list)
    for flip in flips:
        by_name[flip["operator"]].append(flip)
    titles = " ".join(f"{kind:>9}" for kind in (*_KINDS, "float32", "bfloat16", "others"))
    lines = [f"{'operator':32} {'flips':>6} {'found':>6} {'ended':>6} {'masked':>6} {'missed':>6} {titles}"]
    for name in sorted(by_name):
        lines.append(_line(name, by_name[name]))
    return [*lines, _line("all", flips)]


def _line(name: str, flips: Sequence[dict]) -> str:
    outcomes = Counter(flip["outcome"] for flip in flips)
    found, masked, ended = sum(outcomes[each] for each in _FOUND), outcomes["masked"], outcomes["ended"]
    places = Counter(flip["execution"] for flip in flips) + Counter(flip["phase"] for flip in flips)
    types = Counter(flip["dtype"] if flip["dtype"] in ("float32", "bfloat16") else "others" for flip in flips)
    cells = [*(places[kind] for kind in _KINDS), *(types[kind] for kind in ("float32", "bfloat16", "others"))]
    counts = f"{len(flips):6} {found:6} {ended:6} {masked:6} {len(flips) - found - ended - masked:6}"
    return f"{name:32} {counts} {' '.join(f'{cell:9}' for cell in cells)}"


def _clean(results: Sequence[dict]) -> list[str]:
    lines = []
    for name in dict.fromkeys(result["case"] for result in results):
        runs = [result for result in results if result["case"] == name]
        steps, operators = (sum(run[key] for run in runs) for key in ("steps", "operators"))
        alarms = [alarm for run in runs for alarm in run["alarms"]]
        lines.append(
            f"clean: {name}, {runs[0]['world']} ranks: {steps} iterations, {operators} operators verified on rank 0, "
            f"{len(alarms)} false alarms{_in_windows(runs)}\n       {' '.join(runs[0]['flags'])}"
        )
        lines += alarms[:10]
    return lines


def _in_windows(runs: Sequence[dict]) -> str:
    if not any(run["way"] == "plan" for run in runs):
        return ""
    last = runs[-1]["coverage"]
    return f"; of an iteration's {sum(last.get(name, 0) for name in _SETS)} operators {last['in windows']} in windows"


_SETS = ("P", "D_inter", "D_intra", "naive")
