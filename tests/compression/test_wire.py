"""A node's half: what the app sees, what is sent, and what is kept."""

import numpy as np
import pytest
from compression_toy import packed_in
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from toy import reply_with

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task
from flwr_hetero.compression import wire
from flwr_hetero.compression.wire import unpacking

START = np.linspace(-1, 1, 300).astype(np.float32).reshape(30, 10)
MOVE = np.random.default_rng(1).normal(size=START.shape).astype(np.float32)
STEP = 1.01 * np.abs(MOVE).max() / 7


@pytest.fixture(autouse=True)
def run_of_messages():
    be_server_task(run_id=1, task_id=1, node_id=1)


def new_context():
    return Context(1, 1, {}, RecordDict(), {})


def instruction(model=None, bits=4, feedback=True, kind="train"):
    model = {"x": Array(START)} if model is None else model
    asked = {keys.BITS_UP: bits, keys.FEEDBACK: feedback}
    content = {"arrays": ArrayRecord(model), keys.COMPRESSION: ConfigRecord(asked)}
    return Message(RecordDict(content), 1, kind)


def ask(context, message=None, change=lambda x: x + MOVE):
    """Return the answer of an app that changes each array of a model."""

    def app(message, context):
        assert keys.COMPRESSION not in message.content
        given = message.content["arrays"]
        assert not packed_in(message.content)
        return reply_with(message, {}, {n: Array(change(a.numpy())) for n, a in given.items()})

    return unpacking(app)(message or instruction(), context).content


def update_in(content, like=START):
    return wire.unpack(content["arrays"]["x"], Array(like))


def test_the_update_is_packed_and_its_error_is_kept_and_added():
    context = new_context()
    sent = np.zeros_like(START)
    for number in range(1, 21):
        reply = ask(context)
        assert packed_in(reply) == ["x"]
        assert reply[keys.COMPRESSION][keys.BITS_UP] == 4
        sent += update_in(reply)
        kept = context.state[keys.RESIDUAL]["x"].numpy()
        np.testing.assert_allclose(sent + kept, number * MOVE, atol=1e-4)
        assert np.abs(kept).max() <= STEP


def test_without_feedback_nothing_is_kept_and_no_update_is_longer():
    context = new_context()
    first = update_in(ask(context, instruction(feedback=False)))
    again = update_in(ask(context, instruction(feedback=False)))
    np.testing.assert_array_equal(first, again)
    assert np.linalg.norm(first) <= np.linalg.norm(MOVE)
    assert keys.RESIDUAL not in context.state


def test_a_packed_model_is_what_the_app_starts_from():
    packed = wire.pack(Array(START), START, 4)
    reply = ask(new_context(), instruction({"x": packed}), lambda x: x + 1)
    np.testing.assert_allclose(update_in(reply), 1.0, atol=1e-6)


STATES = [
    ArrayRecord({"y": Array(MOVE)}),
    ArrayRecord({"x": Array(MOVE[:3])}),
]


@pytest.mark.parametrize("state", STATES, ids=["another array", "another shape"])
def test_what_another_model_has_lost_is_not_added(state):
    context = new_context()
    context.state[keys.RESIDUAL] = state
    np.testing.assert_array_equal(update_in(ask(context)), update_in(ask(new_context())))
    assert np.abs(context.state[keys.RESIDUAL]["x"].numpy()).max() <= STEP


def test_what_is_not_packed():
    model = {"w": Array(START), "n": Array(np.arange(300)), "b": Array(START[:2])}
    reply = ask(new_context(), instruction(model), lambda x: x + 1)
    assert packed_in(reply) == ["w"]
    np.testing.assert_array_equal(reply["arrays"]["n"].numpy(), np.arange(300) + 1)
    for message in (instruction(bits=0), instruction(bits=5), instruction(kind="evaluate")):
        reply = ask(new_context(), message)
        assert not packed_in(reply)
        assert keys.COMPRESSION in reply
    # the server's checks are to see these as they are
    for change in (lambda x: x * np.float32("nan"), lambda x: x[:5], lambda x: x.astype(int)):
        assert not packed_in(ask(new_context(), change=change))


def test_half_precision_stays():
    half = START.astype(np.float16)
    reply = ask(new_context(), instruction({"x": Array(half)}), lambda x: x + np.float16(1))
    assert (packed_in(reply), reply["arrays"]["x"].dtype) == (["x"], "float16")
    found = wire.restored(reply["arrays"], {"x": Array(half)}, 4)["x"].numpy()
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, half + 1, atol=0.01)


def test_without_the_servers_word_nothing_changes():
    message = instruction()
    del message.content[keys.COMPRESSION]
    reply = ask(new_context(), message)
    assert not packed_in(reply)
    assert keys.COMPRESSION not in reply


def test_what_is_lost_is_not_kept_if_it_is_too_much(monkeypatch):
    context = new_context()
    ask(context)
    monkeypatch.setattr(wire, "MOST_BYTES", 4 * START.size - 1)
    assert packed_in(ask(context)) == ["x"]
    assert not context.state[keys.RESIDUAL]
