"""Which fault kinds of the table are tested in which run, and where the remaining kinds are tested."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bundle:
    """One run. ``faults``: (row of the table, time of the fault). ``save``: steps between checkpoints, 0: none."""

    steps: int
    faults: tuple[tuple[str, str], ...]
    save: int = 0
    extra: str = ""


BUNDLES = {
    "harmless": Bundle(
        72,
        (
            ("slow", "step=4:rank=1:for=300ms"),
            ("corrupt-snapshot:copies=own", "step=6:rank=1"),
            ("corrupt-snapshot:copies=peer", "step=8:rank=2"),
            ("stale-snapshot", "step=10:rank=3"),
            ("lose-frame", "step=11:rank=2"),
            ("duplicate-frame", "step=12:rank=0"),
            ("reorder-frames", "step=14:rank=1"),
            ("delay-frames", "step=16:rank=2"),
            ("corrupt-frame", "step=18:rank=3"),
            ("disk-full", "step=20:rank=3:for=500ms"),
            ("lose-reports", "step=30:rank=1"),
            ("duplicate-reports", "step=40:rank=2:for=500ms"),
            ("reorder-reports", "step=50:rank=0:for=500ms"),
            ("delay-reports", "step=60:rank=3:for=500ms"),
        ),
        save=24,
        extra="--hidden-size 128",
    ),
    "replaced": Bundle(
        90,
        (
            ("kill", "step=4:rank=0"),
            ("segfault", "step=10:rank=1:phase=forward"),
            ("hang", "step=18:rank=2:phase=backward"),
            ("out-of-memory", "step=34:rank=0:phase=backward"),
            ("out-of-files", "step=42:rank=1"),
            ("io-error", "step=50:rank=2:phase=optimizer"),
            ("lose-device", "step=58:rank=3:phase=forward"),
            ("exception:error=node", "step=66:rank=0"),
            ("drop", "step=74:rank=1"),
            ("exception:error=timeout", "step=80:rank=2"),
            ("exception:error=recoverable", "step=86:rank=3"),
        ),
    ),
    "waited for": Bundle(
        30,
        (
            ("stall", "step=6:rank=1"),
            ("gil", "step=16:rank=2"),
        ),
    ),
    "restarted": Bundle(
        40,
        (
            ("corrupt-checkpoint", "step=10:rank=1"),
            ("exception:error=software", "step=11:rank=2"),
            ("truncate-checkpoint", "step=22:rank=1"),
            ("exit", "step=23:rank=0"),
            ("remove-checkpoint", "step=34:rank=1"),
            ("corrupt-tensor:value=nan", "step=35:rank=0"),
        ),
        save=4,
    ),
    "out of step": Bundle(20, (("out-of-step", "step=6:rank=1:phase=backward"),)),
    "not noticed": Bundle(16, (("stale-state", "step=5:rank=1"), ("corrupt-tensor:value=bit", "step=10:rank=2"))),
}
ELSEWHERE = {
    "exception:error=user": "tests/end_to_end/test_hot_swap_faults.py, test_a_user_error_ends_the_run_with_its_message",
    "terminate": "test_a_stray_sigterm_saves_and_ends_the_run, here",
    "drift": "test_a_node_with_other_flags_is_found_before_training, here",
    "kill:node=n1": "test_a_node_that_loses_its_power_is_replaced, here",
    "kill-agent:node=n1": "tests/end_to_end/test_hot_swap_nodes.py, test_a_standby_node_takes_a_lost_nodes_place",
    "partition:node=n1": "tests/processes/test_nodes.py: needs network namespaces",
    "kill-control": "tests/end_to_end/test_hot_swap_faults.py",
    "bit-flip:mode=once": "tests/end_to_end/test_dmr_injection.py",
    "bit-flip:mode=repeat": "tests/end_to_end/test_dmr_injection.py",
    "bit-flip:mode=stuck": "tests/end_to_end/test_dmr_injection.py",
    "cuda-fault": "test_what_a_lost_cuda_context_says_is_what_the_table_says, here: needs a GPU",
}
"""Where the remaining rows of the table are tested."""
