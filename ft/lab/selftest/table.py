"""The checks of the self-test, in order of importance: what does not fit into the given time is left out at the end."""

from ft.base.errors import UserError
from ft.lab.selftest.values import Check

CHECKS = (
    Check(
        "versions",
        "the versions and settings that training will use; that they fit each other, and are equal on all nodes",
        "versions:versions",
        needs_s=5,
        limit_s=60,
        plants="TORCH_NCCL_BLOCKING_WAIT is set",
    ),
    Check(
        "storage",
        "the run folder can be written and synchronised, and a leader's lease is renewed and seen in time",
        "storage:storage",
        needs_s=3,
        limit_s=60,
        plants="the run folder is below a file",
    ),
    Check(
        "ports",
        "every node reaches every other one at the ports that processes choose",
        "network:ports",
        needs_s=2,
        limit_s=60,
        plants="node 0 listens at another port than it says",
    ),
    Check(
        "clocks",
        "the clocks of the nodes agree, so that reports order events of several nodes correctly",
        "network:clocks",
        needs_s=2,
        limit_s=60,
        plants="the clock of node 0 is 10 s fast",
    ),
    Check(
        "fork",
        "a process forked from one that has imported torch and counted the GPUs can use the device",
        "fork:fork",
        needs_s=8,
        limit_s=60,
        plants="the forked process never returns from its first call of the device",
    ),
    Check(
        "one-rank",
        "a process group of one rank is made, aborted twice, and made again",
        "groups:one_rank",
        needs_s=8,
        limit_s=90,
        plants="a result is wrong",
    ),
    Check(
        "groups",
        "process groups of several ranks are made, aborted in the middle of an all-reduce, and made again, twice",
        "groups:several_ranks",
        needs_s=10,
        limit_s=120,
        plants="the last rank does not come back after the first abort",
    ),
    Check(
        "killed-rank",
        "when a rank is killed in an all-reduce, the others are released",
        "groups:killed_rank",
        needs_s=8,
        limit_s=90,
        plants="nobody closes the epoch of the killed rank",
    ),
    Check(
        "hung-groups",
        "two groups that hang are aborted together, without waiting for each other",
        "groups:hung_groups",
        needs_s=12,
        limit_s=120,
        plants="an abort never returns",
    ),
    Check(
        "snapshot",
        "a snapshot of the training state reaches host memory intact, and how fast",
        "snapshot:snapshot",
        needs_s=8,
        limit_s=120,
        plants="a byte of the snapshot flips",
    ),
    Check(
        "training",
        "ft run trains a small GPT with hot-swap to the end; its losses are the reference of the next checks",
        "training:without_fault",
        needs_s=20,
        limit_s=240,
        plants="a worker reports invalid input",
    ),
    Check(
        "kill",
        "a worker that gets SIGKILL is replaced by a standby, and the losses stay the same, bit for bit",
        "training:kill",
        needs_s=25,
        limit_s=240,
        plants="there is no standby",
    ),
    Check(
        "stall",
        "a worker whose training thread hangs while its heartbeats go on is replaced; losses as above",
        "training:stall",
        needs_s=45,
        limit_s=300,
        plants="there is no standby",
    ),
    Check(
        "stop",
        "a worker that gets SIGSTOP is replaced; losses as above",
        "training:stop",
        needs_s=25,
        limit_s=240,
        plants="there is no standby",
    ),
    Check(
        "ring",
        "the all-reduce between replicas gives the same bits on all members, and those of the sum on the CPU",
        "ring:ring",
        needs_s=10,
        limit_s=120,
        plants="a bit of a member's result flips",
    ),
    Check(
        "digests",
        "DMR's digests on the device equal those of the CPU, and change with every bit",
        "dmr:digests",
        needs_s=6,
        limit_s=120,
        plants="a bit of the tensor on the device flips",
    ),
    Check(
        "reproducible",
        "the operators of training give the same bits when they are executed again, as DMR needs it",
        "dmr:reproducible",
        needs_s=30,
        limit_s=420,
        plants="an operator's result varies",
    ),
)
"""All checks."""

_NAMES = [check.name for check in CHECKS]


def chosen(names: list[str], flag: str) -> list[Check]:
    """Return the checks with these names, in the order of ``CHECKS``.

    Args:
        names: values of ``flag``; each may be several names with commas between them.
        flag: the flag, for the error message.

    Raises:
        UserError: there is no check of that name.
    """
    wanted = [word.strip() for text in names for word in text.split(",")]
    unknown = [name for name in wanted if name not in _NAMES]
    if unknown:
        raise UserError(
            f"{flag}: there is no check {', '.join(map(repr, unknown))}", f"give one of {', '.join(_NAMES)}"
        )
    return [check for check in CHECKS if check.name in wanted]
