"""Where this installation's own files are."""

from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent
"""The folder that holds ``ft``: the checkout, or ``site-packages``. Processes of our own import from it."""
