"""The event file: one schema, whatever a crash has left of the last line."""

import pytest
from waiting import at_once

from ft.base import events
from ft.base.events import Event, EventLog


def example(name: str) -> Event:
    """An event of that name with exactly what the schema asks for."""
    values = {"node": "n0", "worker": "n0.w1", "rank": 1, "epoch": 2, "step": 3}
    needs = events.SCHEMA[name]
    places = {key: values[key] for key in needs.fields}
    return Event(name, 100.0, 5.0, **places, detail=dict.fromkeys(needs.detail, 0))


def test_every_event_survives_writing_and_reading(tmp_path):
    written = [example(name) for name in events.SCHEMA]
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in written:
            log.write(event)
    assert events.read(tmp_path / "events.jsonl") == written


def test_every_constant_is_in_the_schema():
    names = {value for key, value in vars(events).items() if key.isupper() and isinstance(value, str)}
    assert names == set(events.SCHEMA)


@pytest.mark.parametrize("name", [name for name, needs in events.SCHEMA.items() if needs.fields or needs.detail])
def test_what_an_event_lacks_is_named(name, tmp_path):
    needs = events.SCHEMA[name]
    with EventLog(tmp_path / "events.jsonl") as log, pytest.raises(ValueError, match=name) as raised:
        log.write(Event(name, 1.0, 1.0))
    assert all(key in str(raised.value) for key in (*needs.fields, *needs.detail))
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_detail_that_is_no_json_is_refused(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log, pytest.raises(TypeError):
        log.write(events.now(events.CONTROL_RESTARTED, odd=object()))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_costs_that_line_only(cut, tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(example(events.RESUMED))
        log.write(example(events.FINISHED))
    path.write_bytes(path.read_bytes()[:-cut])
    found = events.read(path)
    assert found[0] == example(events.RESUMED)
    assert len(found) == (2 if cut == 1 else 1)
    with EventLog(path) as log:
        log.write(example(events.STOPPED))
    assert events.read(path) == [*found, example(events.STOPPED)]


def test_threads_do_not_mix_their_lines(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")

    def write(worker: str):
        for step in range(50):
            log.write(events.now(events.RESUMED, epoch=1, worker=worker, step=step, pad="x" * 500))

    at_once(write, [f"n0.w{i}" for i in range(4)])
    log.close()
    found = events.read(tmp_path / "events.jsonl")
    assert len(found) == 200
    for i in range(4):
        assert [event.step for event in found if event.worker == f"n0.w{i}"] == list(range(50))
