"""Format the latencies that ``ft simulate quorum`` has measured, as text and as JSON values.

A quorum is the set of FT-HSDP's replicas that execute a training step together; its latency is the time from the last
replica's report until the last leader, or the last rank, has received the quorum.
"""

from collections.abc import Sequence
from typing import Any

from ft.lab.simulate.quorum.run import Measured
from ft.lab.simulate.quorum.shape import Job

PAPER_S, PAPER_FIRST_S, PAPER_RANKS = 0.7, 9.0, 98304
"""From FT-HSDP, section 5: latency of ``get_quorum`` in seconds, that of its first version, and the number of ranks."""
_PERCENTILES = (50, 90, 99, 100)
_KINDS = {"none": "", "death": ", a replica was lost", "return": ", a replica has come"}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile: the smallest value such that ``percent`` percent of the values are not
    greater.
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def as_values(job: Job, measured: Measured) -> dict[str, Any]:
    """Return the result as JSON values; times are in seconds."""
    return {
        "simulation": "quorum",
        "ranks": job.ranks,
        "replicas": job.replicas,
        "nodes": job.tree.size * job.replicas,
        "fan_out": job.fan_out,
        "depth": job.tree.depth,
        "processes": measured.crews,
        "seed": job.seed,
        "seconds": round(measured.seconds, 1),
        "paper_s": PAPER_S,
        "latency_s": {
            kind: {
                to: {f"p{percent}": round(percentile(values, percent), 5) for percent in _PERCENTILES}
                for to, values in (
                    ("leaders", [one.leaders_s for one in rows]),
                    ("ranks", [one.ranks_s for one in rows]),
                )
            }
            | {"quorums": len(rows)}
            for kind, rows in _by_change(measured).items()
        },
    }


def as_text(job: Job, measured: Measured) -> str:
    """Return the result as text."""
    tree, rows, relays = job.tree, _by_change(measured), job.tree.size * job.replicas
    each = f"{job.ranks // job.replicas}, over {tree.size} relays each"
    lines = [
        f"{job.ranks} logical ranks in {job.replicas} replicas of {each}",
        f"real: the quorum server, {job.replicas} leaders' clients, and {relays} relays, all but the leaders' with",
        f"      a TCP connection each to the one above ({job.fan_out} wide, {tree.depth} deep); in {measured.crews} "
        "processes beside the server's",
        f"multiplexed: the {job.node} ranks below a relay share its connection, and one of them parses for all",
        "in a run: the relays are ranks, and the tree has the same shape, but its connections are those of gloo groups",
        "",
        "seconds from the last report to ...       p50       p90       p99       max   quorums",
    ]
    for kind, found in rows.items():
        for name, values in (
            ("the last leader", [one.leaders_s for one in found]),
            ("the last rank", [one.ranks_s for one in found]),
        ):
            figures = "".join(f"{percentile(values, percent):10.4f}" for percent in _PERCENTILES)
            lines.append(f"{name + _KINDS[kind]:<36}{figures}{len(found):10d}")
    lines.append(
        f"{f'the paper, {PAPER_RANKS} ranks':<36}{PAPER_S:10.1f}{'':30}   (its first version: {PAPER_FIRST_S:g})"
    )
    if usual := rows.get("none"):
        median = percentile([one.ranks_s for one in usual], 50)
        lines.append(f"{'the paper / this':<36}{PAPER_S / median:10.1f}")
    return "\n".join(lines)


def _by_change(measured: Measured) -> dict[str, list]:
    found = {kind: [one for one in measured.rounds if one.change == kind] for kind in _KINDS}
    return {kind: rows for kind, rows in found.items() if rows}
