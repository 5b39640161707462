"""The server's half: bytes and fixed point, strange replies, nodes without the mod, resume."""

import numpy as np
import pytest
from compression_toy import Wire, first, goals_of, only_on
from flwr.app import Array, ArrayRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedXgbBagging,
    FedXgbCyclic,
)
from quadratics import fedavg
from recording import History, killed_and_resumed
from toy import app_of, reply_with, rewriting

from flwr_hetero import keys
from flwr_hetero.compression.algorithm import encode
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.strategy import Compressed, FedBuff, FedSlice, RandomSelection, Recorded


def run(strategy, grid, rounds=3, size=300, **settings):
    """Return the model's values, and the records of the rounds."""
    history = History(strategy)
    result = history.start(grid, first(size), rounds, **settings)
    return result.arrays["x"].numpy(), history.records


def traffic(records):
    return sum(record["bytes_up"] + record["bytes_down"] for record in records)


@pytest.mark.parametrize("build", [fedavg, lambda: FedSlice(fedavg())])
def test_bytes_and_fixed_point_at_4_bits(build):
    size = 2_000
    speeds = [1.0, 1.0, 2.0, 4.0]
    goals = goals_of(4, size)
    whole, before = run(build(), Wire(goals, speeds), 5, size)
    values, after = run(Compressed(build()), Wire(goals, speeds), 5, size)
    assert traffic(after) <= 0.25 * traffic(before)
    assert np.linalg.norm(values - whole) <= 0.15 * np.linalg.norm(whole)
    assert len(after) == len(before) == 6


@pytest.mark.parametrize(("up", "down"), [(4, None), (None, 4), (None, None), (8, 2)])
def test_each_way_is_packed_by_itself(up, down):
    grid = Wire(goals_of(2))
    run(Compressed(fedavg(), up, down), grid)
    # the first model is whole
    assert [names for _, names in grid.down] == [[]] * 2 + [["x"] if down else []] * 4
    assert [names for _, names in grid.up] == [["x"] if up else []] * 6


def steady(message, context):
    """Add 1 to each value, whatever the model is."""
    end = message.content["arrays"]["x"].numpy() + np.float32(1)
    metrics = {"num-examples": 100, "num-steps": 1, "examples-processed": 100}
    return reply_with(message, metrics, {"x": Array(end)})


def uneven():
    return ArrayRecord({"x": Array(np.linspace(-3, 3, 300).astype(np.float32))})


@pytest.mark.parametrize("bits_down", [None, 2])
def test_stale_updates_are_added_to_what_was_sent_and_known_exactly(bits_down):
    values = []
    for wrap in (lambda s: s, lambda s: Compressed(s, 4, bits_down)):
        profiles = [DeviceProfile(s, seconds_per_example=1.0) for s in (1.0, 1.3, 9.0)]
        grid = LocalGrid(app_of(steady, (hetero,)), profiles)
        history = History(wrap(FedBuff(fedavg(), buffer_size=1)))
        result = history.start(grid, uneven(), 20)
        values.append(result.arrays["x"].numpy())
        stale = [max(record["fedbuff"]["staleness"]) for record in history.records[1:]]
        assert max(stale) >= 5
    # what 8 bits of a scale lose, and feedback keeps from adding up; another start is off by 1
    np.testing.assert_allclose(values[1], values[0], atol=0.1)


def packed_like(data, name="x", shape=(300,), bits=4):
    return lambda arrays: ArrayRecord({name: Array("float32", shape, f"{keys.PACKED}{bits}", data)})


GOOD = encode(np.ones(300), 4)
LIES = {
    "NaN": packed_like(b"\xc0\x7f" + GOOD[2:]),
    "infinite": packed_like(b"\x80\x7f" + GOOD[2:]),
    "below 0": packed_like(b"\x80\xbf" + GOOD[2:]),
    "1e38": packed_like((0x7E96).to_bytes(2, "little") * 5 + GOOD[10:]),
    "code": packed_like(GOOD[:10] + b"\xff" * 152),
    "short": packed_like(GOOD[:-1]),
    "long": packed_like(GOOD * 1000),
    "empty": packed_like(b""),
    "huge": packed_like(b"\0" * 99, shape=(10**12,)),
    "bits": packed_like(encode(np.ones(300), 8), bits=8),
    "name": packed_like(GOOD, name="y"),
    "no model": lambda arrays: ArrayRecord({}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_strange_reply_costs_that_reply(lie):
    def change(partition, message, reply):
        if partition == 0 and message.content["config"]["server-round"] == 2:
            reply.content["arrays"] = LIES[lie](reply.content["arrays"])

    goals = goals_of(3)
    values, records = run(Compressed(fedavg()), Wire(goals, mods=(rewriting(change), hetero)))
    failed = [[failure["node"] for failure in record["failures"]] for record in records[1:]]
    assert failed == [[], ["node-0"], []]
    assert np.abs(values - goals.mean(axis=0)).max() < 1.0


def test_nodes_without_the_mod_are_taken_as_they_are_and_named_once(caplog):
    goals = goals_of(3)
    grid = Wire(goals, mods=[only_on({1, 2})])
    values, records = run(Compressed(fedavg()), grid, 5)
    assert np.abs(values - goals.mean(axis=0)).max() < 0.8
    assert all(names == [] for node, names in (*grid.down, *grid.up) if node == 0)
    assert all(names == ["x"] for node, names in grid.up if node != 0)
    assert [record["compressed"] for record in records[1:]] == [{"without_mod": 1}] * 5
    assert not any(record["failures"] for record in records)
    assert caplog.text.count("1 of 3 nodes reply without the mod") == 1
    assert "node-0" in caplog.text


def test_a_node_that_joins_without_the_mod_fails_at_most_once():
    grid = Wire(goals_of(4), mods=[only_on({0, 1, 2})])
    late = list(grid.get_node_ids())[3]
    grid.leave(late)

    def watch(number, arrays):
        if number == 2:
            grid.come_back(late)

    _, records = run(Compressed(fedavg()), grid, 5, evaluate_fn=watch)
    assert [len(record["failures"]) for record in records[1:]] == [0, 0, 1, 0, 0]


def test_refusals():
    for trees in (FedXgbBagging(), FedXgbCyclic(), RandomSelection(FedXgbBagging(), 2)):
        with pytest.raises(ValueError, match="trees have no values to round"):
            Compressed(trees)
    for bad in (0, 1, 5, 16, True, "4", 4.5):
        for name in ("bits_up", "bits_down"):
            with pytest.raises(ValueError, match=name):
                Compressed(**{name: bad})


def test_clipping_on_nodes_is_for_updates_without_feedback():
    clipping = [
        DifferentialPrivacyClientSideFixedClipping(fedavg(), 1.0, 1.0, 2),
        DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 0.01, 2),
    ]
    for strategy in clipping:
        with pytest.raises(ValueError, match="longer than they were clipped to"):
            Compressed(strategy)
        assert Compressed(strategy, error_feedback=False).bits_up == 4
        assert Compressed(strategy, None).bits_down == 4


@pytest.mark.parametrize(
    ("strategy", "mods", "hint"),
    [
        (fedavg, [hetero, secaggplus_mod], "take the mod out"),
        (fedavg, [secaggplus_mod, hetero], "take the mod out"),
        (fedavg, [LocalDpMod(1.0, 0.1, 10.0, 1e-5), hetero], "hetero must come first"),
        (
            lambda: DifferentialPrivacyClientSideFixedClipping(fedavg(), 1.0, 1.0, 3),
            [fixedclipping_mod, hetero],
            "hetero must come first",
        ),
    ],
)
def test_mods_that_need_whole_models_end_the_run_with_their_cure(strategy, mods, hint):
    with pytest.raises(RuntimeError, match=hint):
        run(Compressed(strategy(), error_feedback=False), Wire(goals_of(3), mods=mods))


def test_mods_inside_of_ours_see_whole_models():
    clipping = DifferentialPrivacyClientSideFixedClipping(fedavg(), 1e-6, 0.1, 3)
    grid = Wire(goals_of(3), mods=(hetero, fixedclipping_mod))
    values, records = run(Compressed(clipping, error_feedback=False), grid)
    assert not any(record["failures"] for record in records)
    assert all(names == ["x"] for _, names in grid.up)
    # three rounds of at most the norm that updates are clipped to
    assert 0.0 < np.linalg.norm(values) <= 0.3 + 1e-4


def test_a_resumed_run_is_the_same_without_feedback(tmp_path):
    def go(folder, evaluate_fn, resume):
        def evaluate(number, arrays):
            return evaluate_fn(number, {"w": arrays["x"]})

        strategy = Compressed(fedavg(), error_feedback=False)
        recorded = Recorded(strategy, run_dir=folder, resume=resume)
        return recorded.start(Wire(goals_of(3)), first(), 4, evaluate_fn=evaluate)

    killed_and_resumed(go, tmp_path, 2)


@pytest.mark.parametrize(
    ("wrapper", "module", "said"),
    [
        (Compressed, "compression.strategy", "no error feedback. It would be 0.0 GB"),
        (FedSlice, "slices.rule", "optimizers start over in each message"),
    ],
)
def test_the_server_says_what_a_node_cannot_keep(monkeypatch, caplog, wrapper, module, said):
    monkeypatch.setattr(f"flwr_hetero.{module}.MOST_BYTES", 1)
    grid = Wire(goals_of(3))
    wrapper(fedavg()).start(grid, first(), 2)
    assert caplog.text.count(said) == 1
