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
from flwr_hetero._flwr import is_simulation_grid
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.older import OlderClients
from flwr_hetero.records import payload_bytes
from flwr_hetero.server.nodes import GridView, is_simulated, whole_grid
from flwr_hetero_studies import rivals

FLEET = [DeviceProfile(speed) for speed in (1.0, 1.1, 0.5, 0.25, 0.2)]
OURS = {
    "TiFL": partial(ours.TiFL, clients_per_round=3, num_tiers=2, seed=1),
    "TiFL, phase": partial(ours.TiFL, clients_per_round=3, num_tiers=2, profiling="phase"),
    "RandomSelection": partial(ours.RandomSelection, clients_per_round=3),
    "OverSelect": partial(ours.OverSelect, take=3),
    "Oort": partial(rivals.Oort, clients_per_round=3),
    "FedBuff": ours.FedBuff,
    "FedAsync": rivals.FedAsync,
    "FedAT": partial(rivals.FedAT, clients_per_round=2, num_tiers=2),
}


def run(strategy, grid, rounds=4, **settings):
    random.seed(3)  # Flower's sampling
    history = History(strategy)
    counts = not isinstance(strategy.leaf, flower.QFedAvg)  # which cannot average integers
    result = history.start(grid, toy_arrays(buffer=counts), rounds, **settings)
    return result, history.records


def both(make):
    """Run a strategy on nodes of today's API, and on such of the older one."""
    today = run(make(), LocalGrid(toy_app(profile=False), FLEET, seed=1))
    older = run(make(), OlderClients(LocalGrid(older_app(), FLEET, seed=1)))
    return today, older


def without_private(records):
    """Drop from a history what cannot be equal: wall time, and the older API's own metrics."""
    for record in records:
        record.pop("wall_s")
        record["evaluate"].pop("loss", None)
        for name in ("bytes_up", "bytes_down"):
            record[name] = 0
    return records


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_flowers_strategies_make_the_same_model(name):
    (today, _), (older, _) = both(lambda: ours.Wrapper(FLOWER_STRATEGIES[name]()))
    assert today.arrays.keys() == older.arrays.keys()
    for key in today.arrays:
        assert np.array_equal(today.arrays[key].numpy(), older.arrays[key].numpy())
        assert today.arrays[key].dtype == older.arrays[key].dtype


@pytest.mark.parametrize("name", OURS)
def test_our_strategies_write_the_same_history(name):
    (today, known), (older, found) = both(OURS[name])
    assert np.array_equal(today.arrays["w"].numpy(), older.arrays["w"].numpy())
    assert without_private(found) == without_private(known)
    assert found[-1]["virtual_s"] > 0


def test_a_strategy_of_flowers_alone():
    strategy = flower.FedAvg(min_available_nodes=2)
    grid = OlderClients(LocalGrid(older_app(), FLEET))
    result = strategy.start(grid, toy_arrays(), num_rounds=2)
    alone = flower.FedAvg().start(LocalGrid(toy_app(), FLEET), toy_arrays(), num_rounds=2)
    assert np.array_equal(result.arrays["w"].numpy(), alone.arrays["w"].numpy())
    (first, _) = result.evaluate_metrics_clientapp.values()
    assert dict(first) == {"loss": 0.25, "eval-acc": pytest.approx(0.52)}


def test_the_client_gets_all_settings():
    seen = []
    strategy = ours.Wrapper(ours.LocalSteps(flower.FedProx(proximal_mu=0.5), fast_steps=4))
    settings = ConfigRecord({"lr": 0.1, "name": "x", "on": True})
    grid = OlderClients(LocalGrid(older_app(seen), FLEET))
    run(strategy, grid, 2, train_config=settings)
    config = {"lr": 0.1, "name": "x", "on": True, "proximal-mu": 0.5}
    assert {key: seen[0][key] for key in config} == config
    assert [each["server-round"] for each in seen] == [1] * 5 + [2] * 5
    assert {each["num-steps"] for each in seen[5:]} != {seen[5]["num-steps"]}


def test_biased_local_sgd_gives_quick_nodes_more_steps():
    class Counts(Client):
        def more(self, config):
            steps = int(config["num-steps"])
            return {"num-steps": steps, "examples-processed": 8 * steps}

    profiles = [DeviceProfile(4.0)] * 2 + [DeviceProfile(1.0)] * 3
    grid = OlderClients(LocalGrid(older_app(client=Counts), profiles))
    _, records = run(ours.BiasedLocalSGD(fast_steps=8, weigh_by_steps=True), grid, 4)
    steps = records[-1]["biased_local_sgd"]["num_steps"]
    assert steps == {"node-0": 8, "node-1": 8, "node-2": 2, "node-3": 2, "node-4": 2}


class Steps(Client):
    """Follow ``num-steps`` by the lines that the documentation shows."""

    def fit(self, parameters, config):
        w, *rest = parameters
        batches = hetero.batches([np.zeros(8)] * 20, config)
        for _ in batches:
            w = (w + 0.25 * (target(self.partition) - w)).astype(np.float32)
        return [w, *rest], 160, {}


def test_fedslice_with_the_mod_on_the_nodes():
    """Quick nodes take more steps, and a round is as much work as one of FedAvg."""
    clock = []
    for strategy in (ours.FedSlice(concurrency=4), ours.Wrapper()):
        app = older_app(client=Steps, mods=[hetero])
        grid = OlderClients(LocalGrid(app, FLEET, seed=1))
        result, records = run(strategy, grid, 6)
        assert len(result.evaluate_metrics_clientapp) == 6
        clock.append(records[-1]["virtual_s"])
    assert clock[0] < clock[1] / 2


class AwayFromZero(Client):
    """No update may be zero: Flower's clipping divides by its norm."""

    def fit(self, parameters, config):
        return [parameters[0] + 1.0 + self.partition], 100, {}


@pytest.mark.parametrize(
    ("mod", "around"),
    [
        (fixedclipping_mod, "DifferentialPrivacyClientSideFixedClipping"),
        (adaptiveclipping_mod, "DifferentialPrivacyClientSideAdaptiveClipping"),
    ],
)
def test_clipping_on_nodes(mod, around):
    settings = {"noise_multiplier": 0.0001, "num_sampled_clients": 5}
    settings |= {"clipping_norm": 1.0} if "Fixed" in around else {"initial_clipping_norm": 1.0}
    private = getattr(flower, around)(flower.FedAvg(), **settings)
    grid = OlderClients(LocalGrid(older_app(client=AwayFromZero, mods=[mod]), FLEET))
    result = ours.Wrapper(private).start(grid, toy_arrays(buffer=False), 1)
    (w,) = result.arrays.to_numpy_ndarrays()
    assert np.linalg.norm(w) == pytest.approx(1.0, abs=0.05)
    assert len(result.evaluate_metrics_clientapp) == 1


def test_metrics_that_are_no_numbers_are_said_once(caplog):
    result, _ = run(ours.Wrapper(), OlderClients(LocalGrid(older_app(), FLEET)))
    assert set(result.train_metrics_clientapp[1]) == {"train-loss"}
    said = [r.getMessage() for r in caplog.records if "no numbers" in r.getMessage()]
    assert said == ["OlderClients: metrics that are no numbers are left out: device (str)"]


def test_nothing_of_a_reply_is_lost_or_kept_twice():
    grid = LocalGrid(older_app(), FLEET)
    adapter = OlderClients(grid)
    content = RecordDict({"model": toy_arrays(), "settings": ConfigRecord({"server-round": 1})})
    own = ConfigRecord({"version": 3})
    content[keys.ORDER] = own
    message = Message(content, 1000, "train")
    (message_id,) = adapter.push_messages([message, message])
    assert message.metadata.message_id == message_id
    assert set(message.content) == {"model", "settings", keys.ORDER}
    (reply,) = adapter.wait_for([message_id])
    assert set(reply.content) == {"model", "metrics", keys.TIMING}
    assert reply.content["model"]["n"].shape == ()
    assert reply.content["model"]["n"].dtype == "int64"
    assert reply.metadata.reply_to_message_id == message_id
    assert payload_bytes(reply.content) == payload_bytes(toy_reply().content)
    assert adapter._sent == {}


def toy_reply():
    grid = LocalGrid(toy_app(), FLEET)
    content = RecordDict({"arrays": toy_arrays(), "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, 1000, "train")])
    return reply


def test_records_for_mods_reach_the_node():
    seen = []

    def mod(message, context, call_next):
        seen.append(sorted(message.content))
        return call_next(message, context)

    grid = OlderClients(LocalGrid(older_app(mods=[mod]), FLEET))
    content = RecordDict({"arrays": toy_arrays(), keys.ORDER: ConfigRecord({"version": 1})})
    grid.send_and_receive([Message(content, 1000, "train")])
    assert seen == [["fitins.config", "fitins.parameters", keys.ORDER]]


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


def test_a_reply_collected_twice_is_an_error():
    grid = OlderClients(LocalGrid(older_app(), FLEET))
    content = RecordDict({"arrays": toy_arrays(), "config": ConfigRecord()})
    ids = grid.push_messages([Message(content, 1000, "train")])
    (first,) = grid.wait_for(ids)
    (second,) = grid.pull_messages(ids)
    assert (first.has_error(), second.has_error()) == (False, True)


def test_messages_of_other_kinds_pass():
    content = RecordDict({"config": ConfigRecord({"x": 1})})
    grid = OlderClients(LocalGrid(toy_app(), FLEET))
    (reply,) = grid.send_and_receive([Message(content, 1000, "query")])
    assert "No query function" in reply.error.reason


class Fewer(Client):
    def fit(self, parameters, config):
        return parameters[:1], 10, {}


class Deaf(Client):
    fit = None

    def __getattribute__(self, name):
        if name == "fit":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Pickled(Client):
    def fit(self, parameters, config):
        return [np.ones(5), parameters[1]], 10, {}


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (Fewer, r"fit\(\) returned 1 arrays, the model has 2.*\n(.|\n)*initial_arrays = Array"),
        (Pickled, r"array 'w' has shape \(5,\) instead of \(4,\)"),
    ],
)
def test_a_client_that_does_not_fit_ends_the_run_at_once(client, reason, caplog):
    grid = OlderClients(LocalGrid(older_app(client=client), FLEET))
    with pytest.raises(RuntimeError, match=reason):
        run(ours.Wrapper(), grid)
    assert "[ROUND 2/4]" not in caplog.text


def test_a_grid_is_seen_through():
    class InMemoryGrid(LocalGrid):
        """Flower's, by its name."""

    inside = InMemoryGrid(older_app(), FLEET)
    grid = OlderClients(inside)
    assert whole_grid(GridView(grid, [1000])) is grid
    assert is_simulation_grid(grid)
    assert not is_simulation_grid(OlderClients(LocalGrid(older_app(), FLEET)))
    assert is_simulated(grid)
    assert (grid.virtual_time_s, grid.run.run_id) == (0.0, inside.run.run_id)
    assert list(grid.get_node_ids()) == list(inside.get_node_ids())
    with pytest.raises(AttributeError):
        _ = grid.nothing


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"config": ConfigRecord({"x": [1, 2]})}, r"config 'x' must be one value for clients"),
        ({"more": ArrayRecord([np.zeros(1)])}, r"the strategy must send one ArrayRecord, .*more"),
    ],
)
def test_what_the_older_api_lacks_is_refused(content, reason):
    grid = OlderClients(LocalGrid(older_app(), FLEET))
    message = Message(RecordDict({"arrays": toy_arrays(), **content}), 1000, "train")
    with pytest.raises(ValueError, match=reason):
        grid.push_messages([message])


def test_only_a_grid_is_wrapped_and_once():
    with pytest.raises(ValueError, match="grid must be the Grid that the ServerApp is given"):
        OlderClients("grpc")
    grid = OlderClients(LocalGrid(older_app(), FLEET))
    with pytest.raises(ValueError, match="grid must be wrapped only once"):
        OlderClients(GridView(grid, [1000]))


def test_arrays_of_all_kinds_keep_their_shape():
    class Echo(Client):
        def fit(self, parameters, config):
            return parameters, 10, {}

    kinds = [np.float16(2.5), np.ones((2, 0)), np.asfortranarray(np.ones((2, 3))), np.array(True)]
    arrays = ArrayRecord({str(i): Array(np.array(value)) for i, value in enumerate(kinds)})
    grid = OlderClients(LocalGrid(older_app(client=Echo), FLEET))
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), 1000, "train")
    (reply,) = grid.send_and_receive([message])
    for name, sent in arrays.items():
        back = reply.content["arrays"][name]
        assert (back.shape, back.dtype) == (sent.shape, sent.dtype)
        assert np.array_equal(back.numpy(), sent.numpy())
