"""Apps of Flower's older API under strategies of today's: what they get, and what comes of it."""

import random
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.client.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from older_toy import Client, older_app
from recording import History
from toy import FLOWER_STRATEGIES, target, toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.older import OlderClients
from flwr_hetero.records import payload_bytes
from flwr_hetero.server.client_support import MissingClientSupportError
from flwr_hetero_studies import rivals

FLEET = [DeviceProfile(speed) for speed in (1.0, 1.1, 0.5, 0.25, 0.2)]
OURS = {
    "TiFL": partial(ours.TiFL, clients_per_round=3, num_tiers=2, seed=1),
    "TiFL, phase": partial(ours.TiFL, clients_per_round=3, num_tiers=2, profiling="phase"),
    "Oort": partial(rivals.Oort, clients_per_round=3),
    "FedBuff": ours.FedBuff,
    "FedAT": partial(rivals.FedAT, clients_per_round=2, num_tiers=2),
}


ALIKE = ["FedAvg", "FedAdam", "FedMedian", "QFedAvg"]
"""Strategies of Flower's: a mean, one with a state, one that sorts, and one that needs losses."""


def older_grid(*, fleet=FLEET, **app):
    return OlderClients(LocalGrid(older_app(**app), fleet, seed=1))


def run(strategy, grid, rounds=4, **settings):
    random.seed(3)  # Flower's sampling
    history = History(strategy)
    counts = not isinstance(strategy.leaf, flower.QFedAvg)  # which cannot average integers
    result = history.start(grid, toy_arrays(buffer=counts), rounds, **settings)
    return result, history.records


def without_private(records):
    """Drop from a history what cannot be equal: wall time, and the older API's own metrics."""
    for record in records:
        for part in ("evaluate", "evaluate_range"):
            record.get(part, {}).pop("loss", None)
        record |= {"wall_s": 0, "bytes_up": 0, "bytes_down": 0}
    return records


@pytest.mark.parametrize(
    "make",
    [*(lambda n=n: ours.Wrapper(FLOWER_STRATEGIES[n]()) for n in ALIKE), *OURS.values()],
    ids=[*ALIKE, *OURS],
)
def test_every_strategy_makes_the_same_model_and_history(make):
    today, known = run(make(), LocalGrid(toy_app(profile=False), FLEET, seed=1))
    older, found = run(make(), older_grid())
    assert today.arrays.keys() == older.arrays.keys()
    for key in today.arrays:
        assert np.array_equal(today.arrays[key].numpy(), older.arrays[key].numpy())
        assert today.arrays[key].dtype == older.arrays[key].dtype
    assert without_private(found) == without_private(known)
    assert found[-1]["virtual_s"] > 0


def test_the_client_gets_all_settings_and_mods_all_records():
    seen = []
    contents = []

    def mod(message, context, call_next):
        contents.append(sorted(message.content))
        return call_next(message, context)

    strategy = ours.Wrapper(ours.CDGraB(ours.LocalSteps(flower.FedProx(proximal_mu=0.5))))
    settings = ConfigRecord({"lr": 0.1, "name": "x", "on": True})
    with pytest.raises(MissingClientSupportError):
        run(strategy, older_grid(seen=seen, mods=[mod]), 2, train_config=settings)
    wanted = dict(settings) | {"proximal-mu": 0.5, "server-round": 1}
    assert wanted.items() <= seen[0].items()
    assert contents == [["fitins.config", "fitins.parameters", keys.ORDER]] * 5


def client_of(fit):
    """Make a class of clients that train by a function of client, arrays and settings."""
    return type("Own", (Client,), {"fit": fit})


def steps(self, parameters, config):
    """Follow ``num-steps`` by the lines that the documentation shows."""
    w, *rest = parameters
    for _ in hetero.batches([np.zeros(8)] * 20, config):
        w = (w + 0.25 * (target(self.partition) - w)).astype(np.float32)
    return [w, *rest], 160, {}


def test_fedslice_with_the_mod_on_the_nodes():
    """A round is as much work as one of FedAvg, and quick nodes take more of its steps."""
    clock = []
    for strategy in (ours.FedSlice(concurrency=4), ours.Wrapper()):
        result, records = run(strategy, older_grid(client=client_of(steps), mods=[hetero]), 6)
        assert len(result.evaluate_metrics_clientapp) == 6
        clock.append(records[-1]["virtual_s"])
    assert clock[0] < clock[1] / 2


@pytest.mark.parametrize(
    ("mod", "private"),
    [
        (fixedclipping_mod, flower.DifferentialPrivacyClientSideFixedClipping),
        (adaptiveclipping_mod, flower.DifferentialPrivacyClientSideAdaptiveClipping),
    ],
)
def test_clipping_on_nodes(mod, private):
    norm = "clipping_norm" if mod is fixedclipping_mod else "initial_clipping_norm"
    strategy = private(flower.FedAvg(), noise_multiplier=1e-4, num_sampled_clients=5, **{norm: 1.0})
    # no update may be zero: Flower's clipping divides by its norm
    client = client_of(lambda self, given, _: ([given[0] + 1.0 + self.partition], 100, {}))
    grid = older_grid(client=client, mods=[mod])
    result = ours.Wrapper(strategy).start(grid, toy_arrays(buffer=False), 1)
    (w,) = result.arrays.to_numpy_ndarrays()
    assert np.linalg.norm(w) == pytest.approx(1.0, abs=0.05)
    assert len(result.evaluate_metrics_clientapp) == 1


def ask(grid, **records):
    """Make an instruction to the first node and send it, twice at once."""
    content = RecordDict({"config": ConfigRecord({"server-round": 1})} | records)
    message = Message(content, 1000, "train")
    (message_id,) = grid.push_messages([message, message])
    (reply,) = grid.wait_for([message_id])
    return message, reply


def test_nothing_of_a_reply_is_lost_or_kept_twice():
    grid = older_grid()
    message, reply = ask(grid, model=toy_arrays(), order=ConfigRecord({"version": 3}))
    assert set(message.content) == {"config", "model", "order"}
    assert set(reply.content) == {"model", "metrics", keys.TIMING}
    assert (reply.content["model"]["n"].shape, reply.content["model"]["n"].dtype) == ((), "int64")
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    _, today = ask(LocalGrid(toy_app(), FLEET), arrays=toy_arrays())
    assert payload_bytes(reply.content) == payload_bytes(today.content)
    assert grid._sent == {}
    (again,) = grid.pull_messages([message.metadata.message_id])
    assert again.has_error()


def test_arrays_of_all_kinds_keep_their_shape():
    kinds = [np.float16(2.5), np.ones((2, 0)), np.asfortranarray(np.ones((2, 3))), np.array(True)]
    arrays = ArrayRecord({str(i): Array(np.array(value)) for i, value in enumerate(kinds)})
    echo = client_of(lambda self, given, _: (given, 10, {}))
    _, reply = ask(older_grid(client=echo), arrays=arrays)
    for name, sent in arrays.items():
        back = reply.content["arrays"][name]
        assert (back.shape, back.dtype) == (sent.shape, sent.dtype)
        assert np.array_equal(back.numpy(), sent.numpy())


def test_errors_and_silence_are_as_they_were():
    faults = [Fault(1, "errs", 1, 1), Fault(2, "dies", 1, 1), Fault(3, "late", 1, 1, delay_s=50)]
    found = []
    for app, around in ((toy_app(), lambda grid: grid), (older_app(), OlderClients)):
        grid = around(LocalGrid(app, FLEET, faults=faults))
        found.append(without_private(run(ours.Wrapper(), grid, 2, timeout=30.0)[1]))
    assert found[0] == found[1]
    failed = {failure["node"]: failure["reason"] for failure in found[0][1]["failures"]}
    silent = "no reply within 30 s"
    assert failed == {"id-1001": "error 2: injected error", "id-1002": silent, "id-1003": silent}


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (
            lambda w, n: [w],
            r"fit\(\) returned 1 arrays, the model has 2.*\n(.|\n)*initial_arrays = ",
        ),
        (lambda w, n: [np.ones(5), n], r"array 'w' has shape \(5,\) instead of \(4,\)"),
    ],
)
def test_a_client_that_does_not_fit_ends_the_run_at_once(arrays, reason, caplog):
    client = client_of(lambda self, given, _: (arrays(*given), 10, {}))
    with pytest.raises(RuntimeError, match=reason):
        run(ours.Wrapper(), older_grid(client=client))
    assert "[ROUND 2/4]" not in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"config": ConfigRecord({"x": [1, 2]})}, r"config 'x' must be one value for clients"),
        ({"more": ArrayRecord([np.zeros(1)])}, r"the strategy must send one ArrayRecord, .*more"),
    ],
)
def test_what_the_older_api_lacks_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        ask(older_grid(), arrays=toy_arrays(), **content)
