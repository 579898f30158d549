"""The folder from which this installation of ``ft`` is imported."""

from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent
"""The folder that contains ``ft``: the checkout, or ``site-packages``. Processes of this project import from it."""
