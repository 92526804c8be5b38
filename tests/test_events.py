"""An event log keeps what it is told, in order, and adds it up."""

import time

from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.events import Action, EventLog
from fsdp_fn.planes import Phase

told = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(Phase), st.sampled_from(Action), st.integers(0, 99))
)


@given(told)
def test_events_are_kept_in_order_and_their_bytes_added_up_by_action(
    events: list[tuple[str, Phase, Action, int]],
) -> None:
    log = EventLog()
    for unit, phase, action, transferred in events:
        log.add(unit, phase, action, time.perf_counter(), transferred)
    assert [(event.unit, event.phase, event.action, event.transferred) for event in log] == events
    assert len(log) == len(events)
    for action in Action:
        assert log.transferred(action) == sum(sent for _, _, done, sent in events if done is action)


def test_an_event_lasts_from_the_given_start_until_it_is_added() -> None:
    log = EventLog()
    start = time.perf_counter()
    time.sleep(0.01)
    log.add("block", Phase.FORWARD, Action.COMPUTE, start)
    (event,) = log
    assert event.start == start
    assert 0.01 <= event.end - event.start <= time.perf_counter() - start


def test_a_cleared_log_is_empty_and_goes_on() -> None:
    log = EventLog()
    log.add("block", Phase.FORWARD, Action.GATHER, 0.0, 8)
    log.clear()
    assert (len(log), log.transferred(Action.GATHER)) == (0, 0)
    log.add("block", Phase.BACKWARD, Action.GATHER, 0.0, 4)
    assert log.transferred(Action.GATHER) == 4


def test_two_logs_share_nothing() -> None:
    first, second = EventLog(), EventLog()
    first.add("block", Phase.FORWARD, Action.GATHER, 0.0)
    assert len(second) == 0
