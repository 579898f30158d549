"""Silences warnings and log messages of dependencies."""

import logging
import os
import warnings


def quieten(level: int | None = None) -> None:
    """Silence warnings and loggers of torch, megatron-core and their dependencies.

    Call this function before these libraries are imported, because they warn about missing optional packages then.

    Args:
        level: logging threshold for these libraries (10 debug ... 40 error). Default: 40. Below 30 their warnings are
            shown too.
    """
    level = logging.ERROR if level is None else level
    if level > logging.INFO:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    # torch sets the level of its own logger at import, but not of the one that warns about a missing CUDA toolkit.
    for name in ("torch", "torch.utils.cpp_extension", "megatron", "matplotlib"):
        logging.getLogger(name).setLevel(level)
