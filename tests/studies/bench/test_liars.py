"""The study of liars: what they send, when, and what a run says of it."""

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from flwr_hetero._flwr import be_server_task
from flwr_hetero_studies.faults import liars


def test_liars_turn_and_scale_their_updates():
    be_server_task(1, 1, 1)
    app, _ = liars.digits_app(0)
    grid = liars.LiarsGrid(app, liars.profiles_for(1), seed=0)
    grid.factor = 20.0
    message = Message(RecordDict({"arrays": ArrayRecord([np.ones(2, "f4")])}), 1000, "train")
    content = RecordDict({"arrays": ArrayRecord([np.full(2, 3.0, "f4")])})
    reply = Message(content, reply_to=message)
    grid.turn(message, reply)
    assert reply.content["arrays"].to_numpy_ndarrays()[0].tolist() == [-39.0, -39.0]


def test_liars_are_quicker_than_all_others():
    speeds = [profile.compute_factor for profile in liars.profiles_for(3)]
    assert set(speeds[:3]) == {liars.EARLY * max(speeds[3:])}
    assert len(speeds) == liars.NODES


def test_a_lie_costs_accuracy():
    honest, lied = (
        liars.run("FedBuff", count, 2.0, rounds=6, seed=0)["accuracy"] for count in (0, 3)
    )
    assert 0.1 < lied < honest
