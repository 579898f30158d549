"""Runs a checkout's script in a worker of ``ft run``; see :mod:`ft.adapters.megatron_lm.start`."""

import sys

from ft.adapters.megatron_lm.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
