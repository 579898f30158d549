"""How long an update is held back for replicas that are fetching the state which it is about to change."""

LONGEST_S = 60.0
"""Doubling ends here; who asks for more gets it from the start."""


def fetch_wait(wait_s: float, first_s: float, *, is_wanted: bool, was_cut: bool) -> float:
    """Seconds that fetches are waited for before the next update. A replica whose fetch takes more than a step would
    never come back otherwise: each time one is cut off, the next may take twice as long.

    Args:
        wait_s: what they were waited for before this update. first_s: what was asked for (``--ft-hsdp-wait``); 0: they
            never are. is_wanted: a replica is behind in this step. was_cut: a fetch was not done by then.
    """
    if not is_wanted:
        return first_s
    return max(first_s, min(LONGEST_S, 2.0 * wait_s)) if was_cut else wait_s
