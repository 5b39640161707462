"""What a real local fleet consists of, kept as a file in its folder."""

import json
from dataclasses import asdict, dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from typing import Any

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.errors import invalid

FILE = "fleet.json"


DRAFT = f"{FILE}.draft"


HOST = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """One SuperNode."""

    name: str
    cpu: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    port: int = 0
    link_port: int = 0
    pid: int = 0

    @property
    def has_link(self) -> bool:
        """Whether its link is limited."""
        return not (isinf(self.uplink_mbps) and isinf(self.downlink_mbps))


@dataclass(frozen=True)
class FleetFile:
    """A fleet, as ``up`` left it."""

    port: int
    database: bool = False
    superlink_pid: int = 0
    warden_pid: int = 0
    nodes: list[Node] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the SuperLink, as Flower wants it."""
        return f"{HOST}:{self.port}"

    @property
    def needs_warden(self) -> bool:
        """Whether any node has a limit that somebody must enforce."""
        return any(node.cpu < 1 or node.has_link for node in self.nodes)

    def node(self, name: str) -> Node:
        """Find a node."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise invalid("node", name, f"be one of {[n.name for n in self.nodes]}", "check the name")

    def with_node(self, node: Node) -> "FleetFile":
        """Return a copy in which a node of the same name is replaced."""
        return replace(self, nodes=[node if n.name == node.name else n for n in self.nodes])

    def to_text(self) -> str:
        """Return this fleet as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "FleetFile":
        """Read what :meth:`to_text` wrote."""
        facts: dict[str, Any] = json.loads(text)
        return cls(**facts | {"nodes": [Node(**node) for node in facts["nodes"]]})

    def save(self, folder: Path) -> None:
        """Replace the file in one step."""
        draft = folder / DRAFT
        draft.write_text(self.to_text(), encoding="utf-8")
        draft.replace(folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "FleetFile":
        """Read the file."""
        path = folder / FILE
        if not path.is_file():
            raise invalid("dir", str(folder), "hold a fleet", "start one with `up`")
        return cls.from_text(path.read_text(encoding="utf-8"))


def nodes_of(profiles: list[DeviceProfile], cpu: float = 1.0) -> list[Node]:
    """Turn device profiles into limits for SuperNodes on this machine."""
    if not 0 < cpu <= 1:
        raise invalid("cpu", cpu, "lie in (0, 1]", "1 is a whole CPU")
    fastest = max(profile.compute_factor for profile in profiles)
    return [
        Node(
            name=f"node-{number}",
            cpu=cpu * profile.compute_factor / fastest,
            uplink_mbps=profile.uplink_mbps,
            downlink_mbps=profile.downlink_mbps,
        )
        for number, profile in enumerate(profiles)
    ]
