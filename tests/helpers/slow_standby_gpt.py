"""pretrain_gpt.py with slow steps, whose standbys need an hour for each piece of memory that they keep ready."""

import sys
import time

import pretrain_gpt
from ft.worker import session
from megatron.ft_trainer.data.loader import MicrobatchLoader

_next = MicrobatchLoader.__next__


def slowly(self):
    time.sleep(0.04)
    return _next(self)


if __name__ == "__main__":
    session.PAUSE_S = 3600.0
    MicrobatchLoader.__next__ = slowly
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
