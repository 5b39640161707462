"""A ClientApp without a function for evaluation: nodes are asked once, and no line says failed."""

import pytest
from composition_toy import composition_app
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from recording import History
from toy import toy_arrays

from flwr_hetero import strategy as ours
from flwr_hetero.exchange.checks import NO_EVALUATION
from flwr_hetero.fleet import DeviceProfile, LocalGrid

NODES = 5
STRATEGIES = {
    "rounds": ours.Wrapper,
    "TiFL": lambda inner: ours.TiFL(inner, 3),
    "FedBuff": lambda inner: ours.FedBuff(inner, concurrency=3),
    "FedSlice": ours.FedSlice,
}


def run(make, lacking):
    """Run with some nodes that cannot evaluate; return the history and who was asked to."""
    asked = []

    def mod(message, context, call_next):
        if message.metadata.message_type != "evaluate":
            return call_next(message, context)
        asked.append(int(context.node_config["partition-id"]))
        if asked[-1] not in lacking:
            return call_next(message, context)
        return Message(Error(2, f"ValueError: {NO_EVALUATION}"), reply_to=message)

    history = History(make(FedAvg()))
    grid = LocalGrid(composition_app([mod]), [DeviceProfile()] * NODES)
    history.start(grid, toy_arrays(3, buffer=False), 6)
    return history.records, asked


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_an_app_without_evaluation_is_asked_once(make, caplog):
    records, asked = run(make, range(NODES))
    assert len(records) == 7
    assert asked, "else nothing was tried"
    assert len(asked) == len(set(asked))
    assert not any(record["failures"] for record in records)
    said = [text for text in caplog.messages if "has no function for evaluation" in text]
    assert len(said) == 1


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_other_nodes_still_evaluate(make):
    records, asked = run(make, {0})
    assert asked.count(0) <= 1
    assert asked.count(1) > 1
    assert any(record["evaluate"] for record in records)


def test_the_text_is_that_of_flower():
    grid = LocalGrid(ClientApp(), [DeviceProfile()])
    (reply,) = grid.send_and_receive(
        [Message(RecordDict(), next(iter(grid.get_node_ids())), "evaluate")]
    )
    assert NO_EVALUATION in reply.error.reason
