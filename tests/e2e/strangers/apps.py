"""The public apps of apps.toml, and the lines that a user changes in them for a method."""

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Method(NamedTuple):
    """A method: its strategy, and the rounds in which as many nodes train as in FedAvg's."""

    wrapped: str = "strategy"
    rounds: int = 3
    sampler: str = ""
    needs_model: bool = False

    @property
    def strategy(self) -> str:
        """Return the class that is imported; empty if the server stays as it is."""
        return self.wrapped.partition("(")[0] if "(" in self.wrapped else ""


METHODS = {
    "FedAvg": Method(),
    "FedSlice": Method("FedSlice(strategy)"),
    "TiFL": Method("TiFL(strategy, clients_per_round=2, num_tiers=2)", rounds=6),
    "Mercury": Method(sampler="MercurySampler"),
    "PGD": Method(sampler="PGDSampler", needs_model=True),
    "TopLoss": Method("BiasedLocalSGD(strategy, fast_steps=24, gamma=1)", sampler="TopLossSampler"),
    "CDGraB": Method("CDGraB(strategy)", sampler="OrderedSampler", needs_model=True),
}
HETERO = "from flwr_hetero.mod import hetero"
MOD = f"""
 from flwr.clientapp import ClientApp
+{HETERO}
-app = ClientApp()
+app = ClientApp(mods=[hetero])
"""
START = """
 # Start strategy, run FedAvg for `num_rounds`
+strategy = {}
"""


class Source(NamedTuple):
    """A public repository at a commit, and the folder into which ``fetch`` puts it."""

    folder: str
    address: str
    commit: str


@dataclass(frozen=True)
class App:
    """An app as its author wrote it; apps.toml says what the entries are."""

    kind: str
    source: Source
    folder: str
    package: str
    needs: str
    score: str
    loader: str
    start: str = START
    node: str = MOD
    server: str = "from flwr.serverapp import Grid, ServerApp"
    config: str = ""
    sampler: str = ""
    data: str = ""
    true_warnings: tuple[str, ...] = ()
    criterion: dict[str, str] = field(default_factory=dict)
    everyone: dict[str, str] = field(default_factory=dict)
    here: dict[str, str] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Return the methods that are tried in it."""
        return ["FedSlice", "TiFL", *filter(None, [self.sampler])]

    def changes_for(self, name: str) -> list[tuple[str, str]]:
        """Return a method's diffs, each with its file in the app's package."""
        method = METHODS[name]
        if name == "FedAvg":
            return []
        found = [("client_app.py", self.node)]
        if kind := method.strategy:
            taken = f" {self.server}\n+from flwr_hetero.strategy import {kind}"
            found += [("server_app.py", taken), ("server_app.py", self.start)]
        if kind := method.sampler:
            more = f"sampler={kind}, model=model" if method.needs_model else f"sampler={kind}"
            taken = f" {HETERO}\n+from flwr_hetero.sampler import {kind}"
            loader = re.sub(r", (msg|config)\)", rf", \1, {more})", self.loader)
            found += [("client_app.py", taken), ("client_app.py", loader), *self.criterion.items()]
        elif name != "TiFL":
            found.append(("client_app.py", self.loader))
        return found

    def lines_for(self, name: str) -> int:
        """Count the lines that a user adds or replaces for a method."""
        changes = self.changes_for(name)
        if name in ("FedSlice", "TiFL"):
            changes += self.everyone.items()
        lines = [line for _, diff in changes for line in diff.splitlines()]
        # one that only makes room for another stays
        return sum(line[:1] == "+" and f"-{line[1:]}" not in lines for line in lines)

    def files(self) -> dict[str, str]:
        """Return the files that the app has beside its author's."""
        return FILES[self.data]() if self.data else {}


def messages() -> dict[str, str]:
    """Make the messages of four people, and spam."""
    ham = [
        {"text": f"good{i % 20} good{(i * 7) % 20} bad{i % 5}", "label": 0, "main_uuid": str(i % 4)}
        for i in range(600)
    ]
    spam = [{"text": f"bad{i % 20} bad{(i * 3) % 20} good{i % 5}", "label": 1} for i in range(200)]
    return {"data/ham_messages.json": json.dumps(ham), "data/spam_messages.json": json.dumps(spam)}


def older_server() -> dict[str, str]:
    """Write docs/older-apps.md's server for clients of the older API."""
    return {"fl_dp_sa/server_app.py": OLDER_SERVER}


OLDER_SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr_hetero.older import OlderClients

from fl_dp_sa.task import Net, get_weights

app = ServerApp()


@app.main()
def main(grid: Grid, context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    # start
    arrays = ArrayRecord(get_weights(Net()))
    strategy.start(grid=OlderClients(grid), initial_arrays=arrays, num_rounds=rounds)
"""
FILES = {"messages": messages, "older server": older_server}


def read() -> tuple[dict[str, App], dict[tuple[str, str], str]]:
    """Read the apps, and the reasons why some methods do not work in them."""
    table = tomllib.loads(Path(__file__).with_name("apps.toml").read_text(encoding="utf-8"))
    sources = {name: Source(name, **entries) for name, entries in table["sources"].items()}
    apps = {}
    known = {}
    for name, entries in table["apps"].items():
        for method, why in entries.pop("known", {}).items():
            known[name, method] = why
        apps[name] = App(**entries | {"source": sources[entries["source"]]})
    return apps, known


APPS, KNOWN = read()
