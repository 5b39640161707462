"""What cannot work is refused at the first chance, with the lines to add."""

import subprocess
import sys
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as flower
from older_toy import older_app
from steps_toy import steps_app, steps_arrays
from toy import toy_app, toy_arrays

from flwr_hetero import strategy as ours
from flwr_hetero.errors import HINTS, hint_for
from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.older import OlderClients
from flwr_hetero_studies import rivals

FLEET = [DeviceProfile(speed) for speed in (1.0, 1.1, 0.5, 0.25, 0.2)]
LOOPS = {
    "Wrapper": ours.Wrapper,
    "RandomSelection": lambda: ours.RandomSelection(clients_per_round=3),
    "TiFL": lambda: ours.TiFL(clients_per_round=3, num_tiers=1),
    "TiFL, phase": lambda: ours.TiFL(clients_per_round=3, num_tiers=1, profiling="phase"),
    "BiasedLocalSGD": ours.BiasedLocalSGD,
    "FedBuff": ours.FedBuff,
    "FedAT": lambda: rivals.FedAT(clients_per_round=3, num_tiers=1),
    "FedSlice": ours.FedSlice,
    "Compressed": ours.Compressed,
}


def run(strategy, grid, rounds=3):
    return strategy.start(grid, toy_arrays(), rounds)


FAULTS = [  # app, whether its grid is in OlderClients, symptom, hint
    (older_app(), False, "fitins", "grid=OlderClients(grid), ...)"),
    (toy_app(mods=[secaggplus_mod]), False, "secaggplus_configs", "take the mod out"),
]
FAULTS_OF_ONE = [
    (toy_app(), True, "", "there is no OlderClients"),
    (older_app(mods=[secaggplus_mod]), True, "", "take the mod out"),
    (toy_app(mods=[fixedclipping_mod]), False, "", "ClientSideFixedClipping(FedAvg(), "),
    (ClientApp(), False, "", "@app.train()"),
]


@pytest.mark.parametrize(
    ("name", "fault"), [*product(LOOPS, FAULTS), *product(["TiFL"], FAULTS_OF_ONE)]
)
def test_a_fault_of_the_app_ends_every_loop_at_once_with_its_cure(name, fault, caplog):
    app, older, symptom, hint = fault
    grid = LocalGrid(app, FLEET)
    with pytest.raises(RuntimeError) as caught:
        run(LOOPS[name](), OlderClients(grid) if older else grid)
    assert symptom in str(caught.value)
    assert hint in str(caught.value)
    assert "[ROUND 2/3]" not in caplog.text


def test_every_cure_is_for_one_symptom():
    reasons = (
        "error 2: KeyError: 'fitins.parameters'",
        "error 2: Exception ClientAppException occurred. Message: 'arrays''>",
        "error 2: ValueError: fit() returned 3 arrays, the model has 6",
        "arrays ['base.weight'] missing or unknown",
        "error 2: KeyError: 'secaggplus_configs'",
        "error 6: fixedclipping_mod requires the key 'clipping_norm' to be present",
        "error 6: fixedclipping_mod expects exactly one ConfigRecord, but found 2",
        "error 2: ValueError: No train function registered with name 'default'",
        "error 8: ModuleNotFoundError: No module named 'flwr_hetero'",
    )
    assert [hint_for(reason) for reason in reasons] == [*HINTS.values()]
    packed = (
        "TypeError: Unsupported serialization type for numpy conversion: 'flwr-hetero.packed-4'"
    )
    assert "hetero must come first" in hint_for(packed)
    others = ("No train function registered with name 'profile'", "KeyError: 'lr'", "")
    assert not any(map(hint_for, others))


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda older: older.FedAvg(), "from flwr.serverapp.strategy import FedAvg; fraction_fit"),
        (lambda older: older.FaultTolerantFedAvg, "strategy import FedAvg; "),
        (lambda older: type("Own", (older.Krum,), {})(), "strategy import Krum; "),
        (lambda older: ours.TiFL, "give an instance, for example FedAvg()"),
        (lambda older: "FedAvg", "got 'FedAvg': give an instance"),
    ],
)
def test_what_is_no_strategy_of_today(make, hint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from flwr.server import strategy as older
    with pytest.raises(ValueError, match=r"^strategy must be a flwr\.serverapp") as caught:
        ours.TiFL(make(older))
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda leaf: ours.TiFL(leaf, 4, 2), "clients_per_round"),
        (lambda leaf: ours.FedBuff(ours.LocalSteps(leaf), buffer_size=4), "buffer_size"),
    ],
)
def test_too_few_updates_are_refused_at_construction(make, argument):
    with pytest.raises(ValueError, match=f"^{argument} must be at least 5 around Krum with num_m"):
        make(flower.Krum(num_malicious_nodes=1))
    make(flower.Krum())


KRUM = partial(flower.Krum, num_malicious_nodes=1)
BULYAN = partial(flower.Bulyan, num_malicious_nodes=1)
HALF = partial(BULYAN, fraction_train=0.5)
FEW = [  # strategy, the least nodes with which it runs, what is said with one less
    (lambda: ours.Wrapper(BULYAN()), 7, "the number of nodes that train .* got 6"),
    (lambda: ours.TiFL(KRUM(), 5, 1), 5, "the number of nodes that train .* got 4"),
    (lambda: ours.Wrapper(HALF()), 14, r"Bulyan.min_train_nodes .* at least 7 .* got 2"),
    (lambda: ours.FedBuff(KRUM()), 9, "buffer_size .* at least 5 .* got 4: .* not given"),
    (lambda: ours.FedSlice(KRUM()), 20, "the number of nodes .* 20 .* got 19: .*_size=5"),
    (lambda: ours.FedSlice(KRUM(), concurrency=20), 20, "the number of nodes .* 20 .* got 19"),
]


@pytest.mark.parametrize(("make", "least", "text"), FEW)
def test_too_few_updates_are_refused_by_what_to_change(make, least, text):
    for nodes in (least - 1, least):
        profiles = [DeviceProfile(1.0 + 0.1 * number) for number in range(nodes)]
        models = []
        grid = LocalGrid(steps_app(), profiles)
        start = partial(make().start, grid, steps_arrays(), 1)
        if nodes == least:
            start()
            continue
        with pytest.raises(ValueError, match=f"^{text}"):
            start(evaluate_fn=lambda n, _, into=models: into.append(n))
        assert models == [0]


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (ours.TiFL, "clients_per_round of TiFL"),
        (ours.FedBuff, "concurrency of FedBuff"),
        (rivals.FedAT, "clients_per_round of FedAT"),
        (ours.FedSlice, "concurrency of FedSlice"),
    ],
)
def test_a_fraction_of_nodes_is_called_what_it_is_called_there(make, argument):
    with pytest.raises(ValueError, match=f"fraction_train must be 1.0 .* set {argument} instead"):
        make(flower.FedAvg(fraction_train=0.5))
    with pytest.raises(ValueError, match=f"min_train_nodes must .*{argument.split()[0]} says"):
        make(flower.FedAvg(min_train_nodes=9))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"initial_arrays": [np.zeros(4)]}, "initial_arrays must be an ArrayRecord.* of NumPy"),
        ({"initial_arrays": ArrayRecord()}, "initial_arrays must hold an array"),
        ({"num_rounds": -1}, "num_rounds must be a whole number of at least 0"),
        ({"timeout": 0}, "timeout must be a number in"),
    ],
)
@pytest.mark.parametrize("kind", [ours.Wrapper, ours.FedBuff])
def test_start_refuses_wrong_types(kind, change, reason):
    given = {"grid": LocalGrid(toy_app(), FLEET), "initial_arrays": toy_arrays(), "num_rounds": 1}
    with pytest.raises(ValueError, match=f"^{reason}"):
        kind().start(**given | change)


WITHOUT_TORCH = """
import sys
class No:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, No())
import flwr_hetero.strategy, flwr_hetero.mod, flwr_hetero.older, flwr_hetero.fleet
try:
    import flwr_hetero.sampler
except ImportError as error:
    print(error)
"""


def test_only_samplers_need_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    assert "the samplers of flwr_hetero.sampler work in PyTorch's DataLoader" in done.stdout
    assert "pip install torch, or in a checkout" in done.stdout
