"""Nodes that keep silent, nodes that all fail, and hooks that raise, in every wrapper."""

import numpy as np
import pytest
from attacker import NESTS, attack, leaf, reasons, start
from composition_toy import composition_app
from recording import Folder, History

from flwr_hetero import strategy as ours
from flwr_hetero.fleet import DeviceProfile, Fault, LocalGrid
from flwr_hetero_studies.core.quiet import only_errors

TIMEOUT_S = 20.0


def run(strategy, faults, rounds, path=None):
    """Run on six equal nodes; return all records and who was sent what when."""
    grid = LocalGrid(composition_app(), [DeviceProfile()] * 6, faults=faults)
    sent = []
    push = grid.push_messages

    def watch(messages):
        messages = list(messages)
        sent.extend((grid.virtual_time_s, m.metadata.dst_node_id - 1000) for m in messages)
        return push(messages)

    grid.push_messages = watch
    # here the time-out itself is tested
    strategy.late_limit = None
    whole = ours.Recorded(strategy, run_dir=Folder(path)) if path else History(strategy)
    records = whole.run_dir.records if path else whole.records
    with only_errors():
        whole.start(grid, start(), rounds, TIMEOUT_S)
    return records, sent


@pytest.mark.parametrize("nest", ["none", "LocalSteps", "CDGraB", "Compressed"])
def test_a_silent_node_costs_one_time_out(nest):
    """It dies in round 2: training waits for it, evaluation does not; then it is left alone."""
    strategy = NESTS[nest](leaf(fraction_evaluate=1.0))
    records, sent = run(strategy, [Fault(2, "dies", 2)], 10)
    seconds = np.diff([record["virtual_s"] for record in records])
    assert TIMEOUT_S <= seconds[1] < 1.9 * TIMEOUT_S
    times = [at_s for at_s, node in sent if node == 2 and at_s >= records[1]["virtual_s"]]
    assert (np.diff(times) >= TIMEOUT_S).all()
    assert all(len(record["selected"]) == 5 for record in records[3:5])
    assert all(record["train"] for record in records[1:])


FAILING = {
    "dies": "no reply within 20 s",
    "errs": "error 2: injected error",
    "garbage": "holds NaN or infinity",
}


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("nest", ["none", "TiFL", "FedBuff"])
def test_two_rounds_without_a_reply_stop_the_run(nest, kind, tmp_path):
    """With the reasons, and a checkpoint."""
    faults = [Fault(i, kind, 3) for i in range(6)]
    with pytest.raises(RuntimeError, match=FAILING[kind]):
        run(NESTS[nest](leaf()), faults, 30, tmp_path)
    assert (tmp_path / "state.npz").is_file()


def test_the_error_that_ends_a_run_quotes_little_of_what_nodes_say():
    def rename(message, reply):
        arrays = reply.content["arrays"]
        arrays["\x1b[2J" + 5000 * "w"] = arrays.pop("w")

    with pytest.raises(RuntimeError, match="no reply to training") as raised:
        attack(NESTS["none"](leaf()), dict.fromkeys(range(6), rename))
    assert len(str(raised.value)) < 1000
    assert str(raised.value).isprintable()


def test_nodes_that_are_away_stop_no_run():
    profiles = [DeviceProfile(availability=0.02)] * 3
    records, _ = attack(ours.RandomSelection(leaf(), 3), {}, rounds=30, profiles=profiles)
    assert sum(not record["train"] for record in records) > 20


HOOKS = ["why_bad", "on_replies", "on_train_end", "on_evaluate_replies", "on_evaluate_end"]
HOOKS += ["on_instructions", "round_info"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("nest", ["none", "everything", "FedBuff"])
def test_a_bug_in_a_users_hook_ends_the_run_with_its_traceback(nest, hook):
    def with_a_bug(self, *_):
        raise KeyError("a bug")

    kind = type("Own", (ours.Wrapper,), {hook: with_a_bug})
    with pytest.raises(KeyError, match="a bug") as raised:
        attack(NESTS[nest](kind(leaf(fraction_evaluate=1.0))), {})
    assert raised.traceback[-1].name == "with_a_bug"


def test_a_wrapper_judges_its_own_records_before_any_hook_sees_them():
    class Own(ours.Wrapper):
        def why_bad(self, context, reply):
            return "out of principle" if reply.metadata.src_node_id == 1004 else None

        def on_replies(self, context, replies):
            seen.append([reply.metadata.src_node_id for reply in replies])
            return replies

    seen = []
    records, _ = attack(Own(Own(leaf())), {})
    assert seen == [[1000, 1001, 1002, 1003, 1005]] * 2 * 3
    assert reasons(records, 4) == ["out of principle"] * 3
