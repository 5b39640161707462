"""What a real local fleet consists of, kept as a file in its folder."""

import json
from dataclasses import asdict, dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from typing import Any

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import check_number, invalid

FILE = "fleet.json"
DRAFT = f"{FILE}.draft"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class SuperNodeSpec:
    """One SuperNode: its limits, ports and process."""

    name: str
    cpu: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    port: int = 0
    relay_port: int = 0
    pid: int = 0

    @property
    def has_slow_link(self) -> bool:
        """Whether its link is limited, so that it connects through a relay."""
        return not (isinf(self.uplink_mbps) and isinf(self.downlink_mbps))


@dataclass(frozen=True)
class FleetFile:
    """A fleet, as ``up`` left it."""

    port: int
    database: bool = False
    superlink_pid: int = 0
    throttle_pid: int = 0
    nodes: list[SuperNodeSpec] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the SuperLink, as Flower wants it."""
        return f"{HOST}:{self.port}"

    @property
    def needs_throttle(self) -> bool:
        """Whether any node has a limit."""
        return any(node.cpu < 1 or node.has_slow_link for node in self.nodes)

    def node(self, name: str) -> SuperNodeSpec:
        """Find a node."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise invalid("node", name, f"be one of {[n.name for n in self.nodes]}")

    def with_node(self, node: SuperNodeSpec) -> "FleetFile":
        """Return a copy in which the node of the same name is replaced."""
        return replace(self, nodes=[node if n.name == node.name else n for n in self.nodes])

    def save(self, folder: Path) -> None:
        """Replace the file in one step."""
        draft = folder / DRAFT
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "FleetFile":
        """Read the file."""
        path = folder / FILE
        if not path.is_file():
            raise invalid("dir", str(folder), "hold a fleet", "start one with `up`")
        try:
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return cls(**stored | {"nodes": [SuperNodeSpec(**node) for node in stored["nodes"]]})
        except (ValueError, TypeError, KeyError) as error:
            hint = "end it with `down` and start a new one"
            raise invalid("dir", str(folder), f"hold a readable {FILE} ({error})", hint) from error


def specs_of(profiles: list[DeviceProfile], cpu: float = 1.0) -> list[SuperNodeSpec]:
    """Turn device profiles into limits for SuperNodes on this machine."""
    check_number("cpu", cpu, "(0, 1]")
    fastest = max(profile.compute_factor for profile in profiles)
    return [
        SuperNodeSpec(
            name=f"node-{number}",
            cpu=cpu * profile.compute_factor / fastest,
            uplink_mbps=profile.uplink_mbps,
            downlink_mbps=profile.downlink_mbps,
        )
        for number, profile in enumerate(profiles)
    ]
