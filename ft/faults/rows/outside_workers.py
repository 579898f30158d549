"""Rows of the table of faults (:mod:`ft.faults.table`) for faults outside the workers: messages, checkpoints, nodes,
the control plane, and wrong settings.

A row (:class:`ft.faults.kinds.Row`) says what the injection of a fault does, what a person who watches the run sees,
how the control plane detects the fault, and what the outcome is. A page of the documentation is generated from it.
"""

from functools import partial

from ft.faults import verdict
from ft.faults.kinds import (
    AGENT,
    CONTROL,
    FILES,
    HARMLESS,
    IN_PLACE,
    NETWORK_OF_NODE,
    REPLACED,
    ROOT,
    START,
    STOPPED,
    Row,
    Sign,
)
from ft.faults.rows.signs import LOST, ended
from ft.faults.verdict import HOST, TRANSIENT, USER

# Heading in the table -> rows below it.
GROUPS: dict[str, tuple[Row, ...]] = {
    "Messages": (
        Row(
            "drop",
            "one TCP connection of a process group breaks",
            outcome=IN_PLACE,
            seen="the group that lost a connection, and that no process has died",
            answer="If gloo does not notice the loss, all workers wait, which is detected after 15 s. The third time "
            "within a minute, or within ten steps, the worker is replaced.",
            sign=Sign(TRANSIENT, "connection", partial(verdict.of_suspicion, "dp", "Connection closed by peer")),
        ),
        Row(
            "out-of-step",
            "a worker starts a collective operation that no other worker starts",
            outcome=REPLACED,
            seen="gloo ends the process in which operations of different sizes meet: killed by SIGABRT, seldom by "
            "SIGSEGV: Python writes the stacks of all threads then, and fails if one of them moves on",
            answer="No step is committed while ranks disagree, so wrong results are discarded. Operations of equal "
            "size do not fail but block: they are recovered in place after 15 s.",
            sign=Sign(HOST, "SIGABRT", ended(-6), seldom=("SIGSEGV",)),
        ),
        Row(
            "lose-frame",
            "a chunk of a snapshot on its way to a peer is lost",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects the chunk after it, which is out of order; the snapshot is sent again.",
        ),
        Row(
            "duplicate-frame",
            "a chunk of a snapshot reaches the peer twice",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects a chunk that is out of order; the snapshot is sent again.",
        ),
        Row(
            "reorder-frames",
            "two chunks of a snapshot arrive in swapped order",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects a chunk that is out of order; the snapshot is sent again.",
        ),
        Row(
            "delay-frames",
            "a snapshot's chunks reach the peer late",
            outcome=HARMLESS,
            seen="a step that takes longer",
            answer="The optimizer step waits until the last snapshot is safe.",
        ),
        Row(
            "corrupt-frame",
            "a byte of a snapshot flips on its way to a peer",
            outcome=HARMLESS,
            seen="nothing",
            answer="The checksum is wrong on arrival; the snapshot is sent again.",
        ),
        Row(
            "lose-reports",
            "the reports of a worker to its agent are lost for half a second",
            outcome=HARMLESS,
            seen="nothing",
            answer="A report that needs an answer is sent again. If heartbeats are missing for 10 s and three steps "
            "while others wait, the worker is replaced.",
        ),
        Row(
            "duplicate-reports",
            "each report of a worker arrives twice for a while",
            outcome=HARMLESS,
            seen="nothing",
            answer="A report that was processed before is ignored; the journal records this.",
        ),
        Row(
            "reorder-reports",
            "pairs of successive reports of a worker arrive in swapped order for a while",
            outcome=HARMLESS,
            seen="nothing",
        ),
        Row(
            "delay-reports", "each report of a worker arrives 0.3 s late for a while", outcome=HARMLESS, seen="nothing"
        ),
    ),
    "Checkpoints": (
        Row(
            "corrupt-checkpoint",
            "one byte of the newest checkpoint flips",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file with the wrong checksum and which checkpoint is loaded",
            answer="Every file is verified before a checkpoint is loaded; the previous checkpoint is loaded instead.",
        ),
        Row(
            "truncate-checkpoint",
            "a file of the newest checkpoint loses its second half",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is too short and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
        Row(
            "remove-checkpoint",
            "a file of the newest checkpoint is missing",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is missing and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
    ),
    "Nodes and the control plane": (
        Row(
            "kill",
            "a node loses its power: its agent and all its workers are gone",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            answer="The run needs as many standbys as the node had workers. No state is lost if peers on other nodes "
            "hold copies of it.",
            sign=Sign(HOST, "node lost", LOST),
        ),
        Row(
            "kill-agent",
            "an agent is killed; its workers end with it",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            sign=Sign(HOST, "node lost", LOST),
        ),
        Row(
            "partition",
            "a node's network is gone for 10 s",
            how="node=n1",
            where=NETWORK_OF_NODE,
            outcome=REPLACED,
            seen="node n1 is lost: nothing was heard of its agent for 3 s",
            sign=Sign(HOST, "node lost", LOST),
            needs=ROOT,
        ),
        Row(
            "kill-control",
            "SIGKILL for the control plane",
            where=CONTROL,
            outcome=HARMLESS,
            seen="that the control plane was restarted",
            answer="Its agent restarts it from the journal; training does not stop.",
        ),
    ),
    "Before training": (
        Row(
            "drift",
            "a worker is started with other flags, environment or code than the others",
            where=START,
            outcome=STOPPED,
            seen="each setting that differs, with both values; exit code 2",
            answer="Workers report their settings before they get a logical rank; no step is trained.",
            sign=Sign(USER, "drift", partial(verdict.of_drift, ["--lr: 0.01 here, 0.02 there"])),
        ),
    ),
}
