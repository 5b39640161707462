"""Waiting for replies of a real fleet, on a clock that the grid moves."""

from types import SimpleNamespace

from flwr.app import Error, Message, RecordDict

from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.server import context

HELD_UP_S, TIMEOUT_S = 180.0, 120.0


class HeldUp:
    """Node 1 goes while it sends its reply, which holds the first poll up; node 2 answers then."""

    def __init__(self, clock):
        self.clock, self.num_polls = clock, 0

    def push_messages(self, messages):
        self.messages = messages
        for number, message in enumerate(messages):
            set_message_id(message, f"{number}")
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        self.num_polls += 1
        lost, answered, _ = self.messages
        if self.num_polls == 1:
            self.clock.now_s += HELD_UP_S
            return [Message(Error(3, "its objects are unavailable"), reply_to=lost)]
        return [Message(RecordDict(), reply_to=answered)] if "1" in ids else []


def test_reply_sent_while_a_poll_was_held_up_counts(monkeypatch):
    def sleep(seconds):
        clock.now_s += seconds

    clock = SimpleNamespace(now_s=5.0, monotonic=lambda: clock.now_s, sleep=sleep)
    monkeypatch.setattr(context, "time", clock)
    be_server_task(1, 1, 1)
    grid, messages = HeldUp(clock), [Message(RecordDict(), node, "train") for node in (1, 2, 3)]
    replies, round_trip_s = context.wait(grid, messages, TIMEOUT_S, None)
    assert [reply.metadata.src_node_id for reply in replies] == [1, 2]
    assert round_trip_s == {"0": HELD_UP_S, "1": HELD_UP_S}
    assert grid.num_polls == 2, "the third node's time is over"
