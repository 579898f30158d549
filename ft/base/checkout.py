"""The path of this installation's own files."""

from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent
"""The folder that contains ``ft``: the checkout, or ``site-packages``. Processes of this project import from it."""
