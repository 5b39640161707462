"""The lines of an error are those for the framework that the app is written in."""

import sys
import textwrap

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_hetero import keys
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import hetero
from flwr_hetero.server.client_support import (
    STEP_LINES,
    STEPS,
    MissingClientSupportError,
    step_lines,
    tell_missing,
)

FRAMEWORKS = ["transformers", "lightning", "pytorch_lightning", "torch", "sklearn"]


@pytest.fixture
def loaded(monkeypatch):
    """Give a function that makes this process one that has loaded these frameworks."""

    def load(*names):
        for name in FRAMEWORKS:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in names:
            monkeypatch.setitem(sys.modules, name, object())

    return load


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["torch", "transformers"], "hetero.batches(trainer.get_train_dataloader(), msg)"),
        (["torch", "lightning", "sklearn"], "max_epochs=1"),
        (["pytorch_lightning"], "max_epochs=1"),
        (["sklearn", "torch"], "loader = hetero.batches(loader, msg)"),
        (["sklearn"], "model.max_iter = hetero.num_steps("),
        ([], "for _ in range(hetero.num_steps("),
    ],
)
def test_lines_are_of_the_framework_at_hand(names, line, loaded):
    loaded(*names)
    text = step_lines(has_mod=False)
    assert line in text
    assert "app = ClientApp(mods=[hetero])" in text
    alone = step_lines(has_mod=True)
    assert line in alone
    assert "ClientApp(" not in alone


def test_lines_for_scikit_learn_and_numpy_run():
    class Model:
        max_iter = 50

    LocalGrid(ClientApp(), [DeviceProfile()])  # so that a message can be made
    msg = Message(RecordDict({"config": ConfigRecord({"num-steps": 3})}), 1, "train")
    known = {"hetero": hetero, "msg": msg, "model": Model(), "X": [0] * 9, "done": []}
    exec(textwrap.dedent(STEP_LINES["sklearn"]), known)
    assert known["model"].max_iter == 3
    exec(textwrap.dedent(STEP_LINES["numpy"]) + "\n    done.append(1)", known)
    assert len(known["done"]) == 3


@pytest.mark.parametrize(("emulated", "has_mod"), [(False, True), (True, False), (None, False)])
def test_where_the_mod_is_there_only_the_steps_are_missing(emulated, has_mod, loaded):
    loaded("torch")
    LocalGrid(ClientApp(), [DeviceProfile()])
    content = RecordDict()
    if emulated is not None:  # a LocalGrid writes times, mod or not
        content[keys.TIMING] = ConfigRecord({keys.TRAIN_TIME: 1.0, keys.EMULATED: emulated})
    with pytest.raises(MissingClientSupportError) as error:
        tell_missing("LocalSteps", STEPS, "abc", 0, [Message(content, 1, "train")])
    assert ("mods=[hetero] is there" in str(error.value)) == has_mod
    assert ("app = ClientApp(mods=[hetero])" in str(error.value)) != has_mod
    assert "loader = hetero.batches(loader, msg)" in str(error.value)
