"""Keeps dependencies from talking over the run's own output."""

import logging
import os
import warnings


def quieten(level: int | None = None) -> None:
    """Silences warnings and loggers of torch, megatron-core and the tools below them.

    Call it before they are imported; libraries warn about absent optional packages while importing.

    Args:
        level: threshold of Python's logging for those libraries (10 debug ... 40 error). Default: 40. Below 30
            their warnings are shown too.
    """
    level = logging.ERROR if level is None else level
    if level > logging.INFO:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    # torch sets the level of its own logger when it is imported, but not of the one that misses a CUDA toolkit.
    for name in ("torch", "torch.utils.cpp_extension", "megatron", "tensorboard", "matplotlib"):
        logging.getLogger(name).setLevel(level)
