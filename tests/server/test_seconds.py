"""Where the seconds of a message went: what real nodes say of them, and the line of a round."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from recording import History
from server.test_checks import reply_with
from steps_toy import steps_app, steps_arrays
from toy import InMemoryGrid

from flwr_hetero import keys
from flwr_hetero._flwr import be_server_task, set_message_id
from flwr_hetero.exchange.checks import judge_latency
from flwr_hetero.exchange.context import Exchange, Fleet
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import timing
from flwr_hetero.records import Latency
from flwr_hetero.server import loop
from flwr_hetero.strategy import FedBuff, FedSlice, TiFL, Wrapper

CLAIM = {keys.START_TIME: 2.0, keys.RECEIVE_TIME: 0.5, keys.TRAIN_TIME: 1.25, keys.SEND_TIME: 0.25}
PARTS = {"wait": 6.0, "start": 2.0, "receive": 0.5, "train": 1.25, "send": 0.25}


def judged(claim, *, simulated=False, emulated=False, work=None):
    reply = reply_with({"num-examples": 1})
    if work is not None:
        reply.content[keys.WORK] = work
    times = {keys.TRANSFER_TIME: 0.0, keys.EMULATED: emulated, **claim}
    reply.content[keys.TIMING] = ConfigRecord(times)
    context = Exchange(Fleet(), simulated=simulated, same_clock=True)
    context.round_trip_s[reply.metadata.reply_to_message_id] = 10.0
    return judge_latency(context, reply)


def test_parts_sum_to_the_round_trip():
    latency = judged(CLAIM)
    assert (latency.seconds, latency.parts) == (1.25, PARTS)
    alone = judged({keys.TRAIN_TIME: 1.25}).parts
    assert alone == {"wait": 8.75, "train": 1.25}
    assert judged({keys.TRAIN_TIME: 10.0}).parts == {"wait": 0.0, "train": 10.0}


@pytest.mark.parametrize("key", CLAIM)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), "3", 2**64 - 1, 9.75])
def test_claims_that_cannot_be_are_not_kept(key, bad):
    """Those that are no numbers, or that together are more than the round trip."""
    # a reply may be sent more quickly than the one before
    rest = {"wait": 6.25, "start": 2.0, "receive": 0.5, "train": 1.25}
    slower = key == keys.SEND_TIME and bad in (9.75, 2**64 - 1)
    assert judged(CLAIM | {key: bad}).parts == (rest if slower else None)


@pytest.mark.parametrize("where", [{"simulated": True}, {"emulated": True}])
def test_only_real_nodes_are_divided(where):
    assert judged(CLAIM, **where).parts is None


def test_line_of_a_round_has_means_by_node():
    be_server_task(1, 1, 1)
    context = Exchange(Fleet())
    context.messages = [Message(RecordDict(), node, "train") for node in (7, 7, 8, 9)]
    for i, message in enumerate(context.messages):
        set_message_id(message, str(i))
    times = [{"wait": 1.0, "train": 2.0}, {"wait": 2.0, "train": 1.0, "start": 0.5004}, None]
    context.latency = {str(i): Latency(2.0, False, "reported", t) for i, t in enumerate(times)}
    node = context.identity(7)
    other = context.identity(8)
    found = loop._times_by_node(context)
    assert found["latency"] == {node: 2.0, other: 2.0}
    expected = {"wait": {node: 1.5}, "train": {node: 1.5}, "start": {node: 0.25}}
    assert found["seconds"] == expected


class RealGrid(InMemoryGrid):
    """A grid of real nodes, as a strategy sees it: they do nothing, in no time."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        for reply in replies:
            reply.content[keys.TIMING].update(dict.fromkeys(CLAIM, 0.0) | {keys.EMULATED: False})
        return replies


STRATEGIES = {
    "FedAvg": Wrapper,
    "FedSlice": FedSlice,
    "FedBuff": FedBuff,
    "TiFL": lambda: TiFL(clients_per_round=2, num_tiers=2),
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("is_real", [True, False])
def test_every_strategy_keeps_them(make, is_real):
    grid = LocalGrid(steps_app(mods=[timing]), profiles=[DeviceProfile()] * 4)
    history = History(make())
    history.start(RealGrid(grid) if is_real else grid, steps_arrays(), 2)
    lines = [record for record in history.records if record["latency"]]
    assert lines
    for line in lines:
        assert ("seconds" in line) == is_real
        assert not is_real or line["seconds"].keys() == PARTS.keys()
        for seconds in line.get("seconds", {}).values():
            assert seconds.keys() == line["latency"].keys()
