"""pretrain_gpt.py in which every fetch of a state takes longer than a step, and workers print when they rehearse."""

import sys
import time

import pretrain_gpt
from ft.state.fetch.handler import Handler

FETCH_S = 0.6
REHEARSED = "rehearsed at "

_send_bytes, _run = Handler._send_bytes, pretrain_gpt.run


def slowly(self, offer, *piece) -> None:
    """Delay a fetch whose first byte has not been sent yet."""
    if self._visit is not None and not self._visit[1].sent:
        time.sleep(FETCH_S)
    _send_bytes(self, offer, *piece)


def run(options) -> int:
    from megatron import patches

    patches.apply()
    from megatron.training import trainer

    rehearse = trainer.rehearse

    def said(job, samples: int) -> None:
        rehearse(job, samples)
        print(f"{REHEARSED}{time.time()}", flush=True)

    trainer.rehearse = said
    return _run(options)


if __name__ == "__main__":
    Handler._send_bytes, pretrain_gpt.run = slowly, run
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
