"""Asynchronous saves of a checkout, and the checkpoints in its folder."""

from pathlib import Path

from ft.adapters.megatron_lm import tree

TRACKER = "latest_checkpointed_iteration.txt"


def finish() -> None:
    """Wait until all asynchronous saves that were started are complete. All ranks have to call it."""
    async_utils = tree.module("async_utils")
    if not async_utils.is_empty_async_queue():
        async_utils._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=False)


def abandon() -> None:
    """Stop the asynchronous saves under way. Their step is not committed yet; when it is repeated, it saves again."""
    async_utils = tree.module("async_utils")
    queue = async_utils._async_calls_queue
    while queue.async_calls:
        process = getattr(queue.async_calls.popleft().async_caller, "process", None)
        if process is not None:
            process.kill()
            process.join()


def newest(folder: str | None) -> Path | None:
    """Return the newest checkpoint that the tracker file in ``folder`` names; None if there is none."""
    if folder is None:
        return None
    try:
        step = int((Path(folder) / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    found = Path(folder) / f"iter_{step:07d}"
    return found if found.is_dir() else None
