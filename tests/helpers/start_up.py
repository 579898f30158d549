"""How long a Python process takes to start on this machine, for limits of commands that have to import torch first."""

import functools
import subprocess
import sys
import time

_TIMES = 10


@functools.cache
def limit_s() -> float:
    """Return a limit in seconds for a short command that imports torch: ten times what the import takes here, now."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return _TIMES * (time.monotonic() - begun)
