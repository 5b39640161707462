"""A node that is asked again before the next merge is told so."""

from toy import toy_app, toy_arrays

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.strategy import FedBuff


def test_node_asked_again_within_a_merge_is_told():
    asked = {}

    def note(message, context, call_next):
        config, node = message.content["config"], context.node_config["partition-id"]
        if message.metadata.message_type == "evaluate":
            return call_next(message, context)
        asked.setdefault((node, config[keys.SERVER_ROUND]), []).append(config.get(keys.REPEAT))
        return call_next(message, context)

    quick, slow = DeviceProfile(9.0), DeviceProfile(1.0)
    grid = LocalGrid(toy_app(mods=[note]), profiles=[quick, slow])
    FedBuff(buffer_size=5, weighting="equal").start(grid, toy_arrays(), num_rounds=2)
    assert asked[0, 1] == [None, 1, 2, 3, 4]
    assert asked[1, 1] == [None]
    assert asked[0, 2][:2] == [None, 1]
