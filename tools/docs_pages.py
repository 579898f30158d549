"""Hook of mkdocs (``mkdocs.yml``): links what the site shows into ``build/pages``, at its place in the repository."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs", "examples", "tools")


def on_config(config):
    """Make the folder of links before mkdocs reads it."""
    pages = ROOT / "build/pages"
    pages.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        (pages / name).unlink(missing_ok=True)
        (pages / name).symlink_to(ROOT / name)
    return config
