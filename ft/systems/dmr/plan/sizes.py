"""Format memory and file sizes for the output of the DMR commands."""


def gigabytes(value: float) -> str:
    """Return a size in bytes as text with a decimal unit: "61.3 GB", "12.4 MB", "310 B"."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= least:
            return f"{value / least:.1f} {unit}"
    return f"{value:.0f} B"
