"""Write report files atomically."""

from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees either the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
