"""The first cause of a crash, from errors that are planted: classes, groups, attempts, and the formats of logs."""

import pytest
from planted_crashes import GLOO, NCCL_TIMEOUT, SEGFAULT, USERS

from ft.faults import first_cause as causes
from ft.faults.first_cause import CrashError, Frame, Raised, class_of_exception, first_cause
from ft.record import crash


def raised(kind: str, message: str = "", name: str = "work") -> tuple[Raised, ...]:
    return (Raised((kind,), message, (Frame("train.py", 8, name),)),)


def error(rank: int, kind: str, message: str = "", when: float = 0.0, **values) -> CrashError:
    return CrashError(f"n0.w{rank}", "n0", rank, raised(kind, message), "a stack", when=when, **values)


LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4753"


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        ("ValueError", "sample 17 has no tokens", causes.PROGRAM),
        ("AssertionError", "", causes.PROGRAM),
        ("KeyError", "'timeout'", causes.PROGRAM),
        ("UserError", "--tp 3 does not divide 4", causes.PROGRAM),
        ("RuntimeError", "CUDA error: device-side assert triggered", causes.PROGRAM),
        ("RuntimeError", "the store has run out of samples", causes.PROGRAM),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 MiB", causes.MEMORY),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB", causes.MEMORY),
        ("MemoryError", "", causes.MEMORY),
        ("RuntimeError", "unable to mmap 4 bytes: Cannot allocate memory (12)", causes.MEMORY),
        ("std::bad_alloc", "std::bad_alloc", causes.MEMORY),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", causes.HARDWARE),
        ("RuntimeError", "GPU has fallen off the bus", causes.HARDWARE),
        ("DeviceUnusable", "device 3 does not answer", causes.HARDWARE),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", causes.DEVICE),
        ("AcceleratorError", "CUDA error: unknown error", causes.DEVICE),
        ("OSError", "[Errno 28] No space left on device: '/data/x'", causes.STORAGE),
        ("OSError", "[Errno 116] Stale file handle", causes.STORAGE),
        ("RuntimeError", LOST, causes.CONNECTION),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", causes.CONNECTION),
        ("BrokenPipeError", "[Errno 32] Broken pipe", causes.CONNECTION),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", causes.CONNECTION),
        ("DistBackendError", "ncclRemoteError: A call failed possibly due to a network error", causes.CONNECTION),
        ("DistNetworkError", "failed to recv, got 0 bytes", causes.CONNECTION),
        ("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv", causes.WAIT),
        ("DistStoreError", "wait timeout after 300000ms, keys: /0//cpu//1/0", causes.WAIT),
        ("DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", causes.WAIT),
        ("TimeoutError", "", causes.WAIT),
        ("EpochClosed", "epoch 3 is closed", causes.CLOSED),
        ("KeyboardInterrupt", "", causes.ENDED),
    ],
)
def test_the_class_of_an_exception(kind, message, found):
    assert class_of_exception(Raised((kind,), message)) == found


def test_the_users_exception_comes_before_lost_connections_although_their_clocks_are_earlier():
    found = first_cause(
        [error(rank, "RuntimeError", LOST, when=rank) for rank in (0, 1, 3)] + [error(2, "ValueError", "bad", when=99)]
    )
    assert (found.cause.kind, found.cause.ranks, found.cause.first.head) == (causes.PROGRAM, [2], "ValueError: bad")
    assert [(group.kind, group.ranks) for group in found.consequences] == [(causes.CONNECTION, [0, 1, 3])]
    assert not found.others


@pytest.mark.parametrize("earlier", range(len(causes.CAUSES + causes.CONSEQUENCES) - 1))
def test_every_class_comes_before_the_next_one_whatever_the_clocks_say(earlier):
    first, second = (causes.CAUSES + causes.CONSEQUENCES)[earlier : earlier + 2]
    errors = [
        CrashError("n0.w1", "n0", 1, observed=second, told="b", when=1.0),
        CrashError("n0.w0", "n0", 0, observed=first, told="a", when=2.0),
    ]
    assert first_cause(errors).cause.kind == first == first_cause(reversed(errors)).cause.kind


def test_equal_errors_of_many_ranks_count_once_and_the_earliest_is_shown():
    errors = [error(rank, "ValueError", f"sample {rank}", when=10.0 - rank) for rank in range(4)]
    found = first_cause(errors)
    assert found.cause.ranks == [0, 1, 2, 3] and found.cause.first.rank == 3
    assert not found.others and not found.consequences


def test_an_equal_type_raised_elsewhere_is_another_error():
    other = CrashError("n0.w1", "n0", 1, raised("ValueError", "bad", name="load"), when=2.0)
    found = first_cause([error(0, "ValueError", "bad", when=1.0), other])
    assert found.cause.ranks == [0] and [group.ranks for group in found.others] == [[1]]


def test_without_a_stack_the_message_decides_but_for_its_numbers():
    plain = [CrashError(f"n0.w{r}", "n0", r, (Raised(("ValueError",), f"sample {r}"),)) for r in range(3)]
    assert first_cause(plain).cause.ranks == [0, 1, 2]


def test_clocks_decide_within_a_class():
    found = first_cause([error(0, "ValueError", when=2.0), error(1, "KeyError", when=1.0)])
    assert found.cause.first.rank == 1


def test_an_error_without_a_time_comes_after_those_with_one():
    assert first_cause([error(0, "ValueError", when=None), error(1, "KeyError", when=5.0)]).cause.first.rank == 1


def test_how_a_process_ended_follows_from_its_exception():
    killed = CrashError("n0.w0", "n0", 0, signal=6, when=1.0)
    found = first_cause([killed, error(0, "ValueError", when=2.0)])
    assert found.cause.kind == causes.PROGRAM and not found.others and not found.consequences


def test_what_we_ended_is_a_consequence():
    ended = CrashError("n0.w1", "n0", 1, signal=9, when=0.5, by_us=True)
    found = first_cause([ended, CrashError("n0.w0", "n0", 0, signal=9, when=1.0)])
    assert (found.cause.kind, found.cause.ranks) == (causes.KILLED, [0])
    assert [(group.kind, group.ranks) for group in found.consequences] == [(causes.ENDED, [1])]


def test_the_original_exception_of_a_chain_decides():
    cleanup = (*raised("ValueError", "bad"), *raised("RuntimeError", LOST))
    wrapped = (*raised("RuntimeError", LOST), *raised("TrainingFailed", "no step"))
    errors = [CrashError("n0.w1", "n0", 1, wrapped, when=1.0), CrashError("n0.w0", "n0", 0, cleanup, when=2.0)]
    found = first_cause(errors)
    assert (found.cause.ranks, found.cause.first.head) == ([0], "ValueError: bad")
    assert [(group.kind, group.ranks) for group in found.consequences] == [(causes.CONNECTION, [1])]


def test_of_a_chain_of_causes_the_last_says_where():
    chain = (*raised("KeyError", "'tokens'"), *raised("ValueError", "sample 17 has no tokens"))
    assert CrashError("n0.w0", chain=chain).head == "ValueError: sample 17 has no tokens"


def test_the_last_attempt_counts_and_earlier_ones_with_the_same_error_are_counted():
    errors = [error(2, "ValueError", "bad", attempt=attempt) for attempt in (0, 1, 2)]
    errors.append(error(1, "KeyError", attempt=0))
    found = first_cause(errors)
    assert (found.cause.first.attempt, found.earlier, found.others) == (2, 2, ())


def test_an_attempt_with_consequences_only_does_not_hide_the_cause_before_it():
    found = first_cause([error(2, "ValueError", attempt=0), error(1, "RuntimeError", LOST, attempt=1)])
    assert found.cause.kind == causes.PROGRAM


def test_consequences_alone_still_have_a_first_one():
    wait = error(0, "RuntimeError", "gloo: Timed out waiting 1800000ms for recv", when=1.0)
    found = first_cause([wait, error(1, "RuntimeError", LOST, when=2.0)])
    assert found.cause.kind == causes.CONNECTION and found.consequences[0].kind == causes.WAIT


def test_ranks_that_others_may_have_waited_for_are_named():
    waits = [error(rank, "DistBackendError", "collective operation timeout") for rank in (0, 1, 3)]
    assert first_cause(waits, world_size=4).quiet == (2,)
    assert first_cause([error(0, "ValueError")], world_size=4).quiet == ()


def test_the_error_of_a_standby_comes_after_those_of_seated_workers():
    standby = CrashError("n0.w9", "n0", None, raised("ImportError", "no module"), when=0.0)
    found = first_cause([standby, CrashError("n0.w1", "n0", 1, signal=11, when=5.0)])
    assert found.cause.ranks == [1] and found.others[0].first.worker == "n0.w9"
    assert first_cause([standby, error(1, "RuntimeError", LOST)]).cause.first.worker == "n0.w9"


def test_no_errors_no_cause():
    assert first_cause([]) is None


# --- logs ------------------------------------------------------------------------------------------------------------


def prefixed(text: str, rank: int = 2) -> str:
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("form", [str, prefixed])
def test_a_traceback_is_read_with_and_without_the_rank_before_each_line(form):
    found = crash.parse("step 1\n" + form(USERS))
    assert found.text == USERS.rstrip() and found.is_last
    (one,) = found.chain
    assert (one.kinds, one.message) == (("ValueError",), "sample 17 of step 3 has no tokens")
    assert one.frames[-1] == Frame("train.py", 8, "check_batch")


def test_the_last_traceback_counts_and_later_output_is_noticed():
    found = crash.parse(GLOO + "step 3\n" + USERS + "step 4\n")
    assert found.chain[0].kinds == ("ValueError",) and not found.is_last


def test_warnings_after_a_traceback_are_no_output():
    text = USERS + "/lib/x.py:3: UserWarning: a group was left open\n  warnings.warn(\n[rank2]:[W1125 12:00] destroy\n"
    assert crash.parse(text).is_last


@pytest.mark.parametrize("word", ["During handling of the above", "The above exception was the direct cause"])
def test_chained_exceptions_belong_together(word):
    between = next(line for line in crash._CHAINED if line.startswith(word))
    found = crash.parse(f"{NCCL_TIMEOUT}step 2\n{USERS}\n{between}\n\n{GLOO}")
    assert [one.kinds[0] for one in found.chain] == ["ValueError", "RuntimeError"]
    assert found.text.startswith("Traceback") and "Connection closed" in found.text and "NCCL" not in found.text


def test_a_message_of_several_lines_is_kept():
    found = crash.parse('Traceback (most recent call last):\n  File "a.py", line 1, in f\nUserError: no\n  fix: yes\n')
    assert found.chain[0].message == "no\n  fix: yes"


def test_the_name_of_a_module_before_an_exception_is_dropped():
    assert crash.parse(NCCL_TIMEOUT).chain[0].kinds == ("DistBackendError",)


def test_the_stack_of_a_fatal_signal_is_read():
    found = crash.parse("step 1\n" + SEGFAULT)
    assert not found.chain and found.is_last
    assert "line 12 in check_batch" in found.text and "Extension modules" not in found.text


def test_of_several_threads_the_one_that_failed_is_shown():
    other = 'Thread 0x00007f63 (most recent call first):\n  File "queue.py", line 1 in get\n\n'
    found = crash.parse(SEGFAULT.replace("Current thread", other + "Current thread"))
    assert "check_batch" in found.text and "queue.py" not in found.text


def test_an_abort_of_cpp_names_its_exception():
    thrown = (
        "terminate called after throwing an instance of 'gloo::IoException'\n  what():  Connection closed by peer\n"
    )
    abort = thrown + SEGFAULT.replace("Segmentation fault", "Aborted")
    found = crash.parse("step 1\n" + abort)
    assert found.chain[0].kinds == ("gloo::IoException",) and found.chain[0].message == "Connection closed by peer"
    assert class_of_exception(found.chain[0]) == causes.CONNECTION


def test_a_crash_while_python_ends_does_not_hide_the_exception_before():
    assert crash.parse(USERS + SEGFAULT).chain[0].kinds == ("ValueError",)


def test_a_refusal_is_read():
    found = crash.parse("step\nerror: --tp 3 does not divide 4\n  fix: give 2\n")
    assert found.chain[0].kinds == ("UserError",) and "fix: give 2" in found.chain[0].message


@pytest.mark.parametrize("text", ["", "step 1\nstep 2\n", "the error: none\n"])
def test_a_log_without_a_crash(text):
    assert crash.parse(text) is None


def test_cut_off_logs_do_no_harm():
    for end in range(len(USERS)):
        crash.parse(USERS[:end])
        crash.parse(USERS + "\nDuring handling of the above exception, another exception occurred:\n" + USERS[:end])
        crash.parse(SEGFAULT[:end])
