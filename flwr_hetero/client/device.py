"""The cost model of an emulated device: compute, link, jitter, availability."""

import tomllib
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np

from flwr_hetero.errors import invalid

FORWARD_SHARE = 1 / 3
"""Cost of a forward pass alone, as a share of forward plus backward."""


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device, relative to a reference device.

    Parameters
    ----------
    compute_factor : float
        Speed relative to the reference device: 2 is twice as fast. TiFL's CPU shares.
    uplink_mbps, downlink_mbps : float
        Link speed in Mbit/s; infinite means that transfers cost nothing.
    jitter : float
        Standard deviation of the logarithm of compute time from round to round.
    availability : float
        Chance in [0, 1] that the device answers a message at all.
    seconds_per_example : float
        Time of the reference device for one example, forward and backward.
    name : str
        For reports.

    Raises
    ------
    ValueError
        If a figure is out of range.

    Examples
    --------
    >>> DeviceProfile(compute_factor=4.0, uplink_mbps=10.0).compute_factor
    4.0
    >>> DeviceProfile(compute_factor=0.0)
    Traceback (most recent call last):
    ...
    ValueError: compute_factor must be positive and finite, got 0.0: ...
    """

    compute_factor: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    jitter: float = 0.0
    availability: float = 1.0
    seconds_per_example: float = 0.01
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("compute_factor", "seconds_per_example"):
            value = getattr(self, field)
            if not (isfinite(value) and value > 0):
                raise invalid(field, value, "be positive and finite", "1.0 is the reference device")
        for field in ("uplink_mbps", "downlink_mbps"):
            value = getattr(self, field)
            if isnan(value) or value <= 0:
                raise invalid(field, value, "be positive", "leave it out for a free link")
        if not (isfinite(self.jitter) and self.jitter >= 0):
            raise invalid("jitter", self.jitter, "be at least 0", "0.1 is about 10 %")
        if not 0 <= self.availability <= 1:
            raise invalid("availability", self.availability, "lie in [0, 1]", "1 is always there")


def compute_time_s(
    profile: DeviceProfile,
    processed: float,
    scored: float = 0.0,
    rng: np.random.Generator | None = None,
) -> float:
    """Time a device computes for, in seconds."""
    work = processed + FORWARD_SHARE * scored
    time_s = work * profile.seconds_per_example / profile.compute_factor
    if rng is not None and profile.jitter:
        time_s *= float(np.exp(profile.jitter * rng.standard_normal()))
    return time_s


def transfer_time_s(profile: DeviceProfile, bytes_down: float, bytes_up: float) -> float:
    """Time a device's link needs for one instruction and its reply, in seconds."""
    return 8e-6 * (bytes_down / profile.downlink_mbps + bytes_up / profile.uplink_mbps)


REAL = "real"
"""The fleet that is not emulated: real devices, real clocks."""


PAPER_5_CPU_SHARES = (4.0, 2.0, 1.0, 0.5, 0.1)
"""TiFL, section 5.1: five equal groups of clients by CPUs."""


GPU_CPU_GAP = 32.0
"""Biased local SGD, section 5.1: the widest gap, gamma = 1/32."""


WIFI_MBPS = (10, 50, 100, 200)
"""Mercury, section 6.2: the bandwidths of its test bed, both ways."""


WIFI_SECONDS_PER_EXAMPLE = 3e-5
"""Such that the small CNN for 28x28 images (82 kB) computes and transfers in the ratio of the
paper's ResNet-18 (45 MB; on a Jetson TX1 about half a second per batch of 32)."""


NAMED_FLEETS: dict[str, tuple[DeviceProfile, ...]] = {
    "uniform": (DeviceProfile(name="reference"),),
    "paper-5": tuple(
        DeviceProfile(compute_factor=share, name=f"{share:g} CPU") for share in PAPER_5_CPU_SHARES
    ),
    "gpu-cpu": (
        *[DeviceProfile(compute_factor=GPU_CPU_GAP, name="GPU")] * 4,
        DeviceProfile(name="CPU"),
    ),
    **{
        f"wifi-{mbps}": (
            DeviceProfile(
                uplink_mbps=mbps,
                downlink_mbps=mbps,
                seconds_per_example=WIFI_SECONDS_PER_EXAMPLE,
                name=f"{mbps} Mbit/s",
            ),
        )
        for mbps in WIFI_MBPS
    },
}
"""Name to equally large groups of devices."""


def named_fleet(fleet: str, num_nodes: int) -> list[DeviceProfile]:
    """Give each node of a fleet its device profile.

    Parameters
    ----------
    fleet : str
        A name in ``NAMED_FLEETS``, or the path of a TOML file with ``[[device]]`` tables that
        hold fields of :class:`DeviceProfile` and a relative ``share`` of the nodes (default 1).
    num_nodes : int
        Number of nodes; node i is the one with ``partition-id`` i.

    Returns
    -------
    list of DeviceProfile
        One per node. Groups are contiguous and as large as their share, rounded, but no kind of
        device is left out while there are as many nodes as kinds.

    Raises
    ------
    ValueError
        If the name is unknown or the file is not of that form.

    Examples
    --------
    >>> [device.compute_factor for device in named_fleet("paper-5", 10)]
    [4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1]
    """
    if num_nodes < 1:
        raise invalid("num_nodes", num_nodes, "be at least 1", "start some SuperNodes")
    if fleet in NAMED_FLEETS:
        groups = [(device, 1.0) for device in NAMED_FLEETS[fleet]]
    else:
        groups = _read_fleet(fleet)
    kinds = [(kind, sum(share for _, share in same)) for kind, same in groupby(groups, _device)]
    sizes = _sizes([share for _, share in kinds], num_nodes)
    return [kind for (kind, _), size in zip(kinds, sizes, strict=True) for _ in range(size)]


def _device(group: tuple[DeviceProfile, float]) -> DeviceProfile:
    return group[0]


def _sizes(shares: list[float], num_nodes: int) -> list[int]:
    """Round shares of the nodes to whole numbers; none is 0 if there are nodes enough."""
    ends = [round(num_nodes * end / sum(shares)) for end in accumulate(shares)]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    while num_nodes >= len(sizes) and 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def _read_fleet(fleet: str) -> list[tuple[DeviceProfile, float]]:
    names = ", ".join(sorted(NAMED_FLEETS))
    cure = f"use one of {names}, or the path of a TOML file, absolute in a run-config"
    path = Path(fleet).expanduser()
    if path.suffix != ".toml" or not path.is_file():
        raise invalid("fleet", fleet, "be a known name or an existing .toml file", cure)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("device", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid("fleet", fleet, f"be valid TOML ({error})", cure) from error
    if not isinstance(tables, list) or not tables:
        raise invalid("fleet", fleet, "hold at least one [[device]] table", "add one")
    return [_read_device(table) for table in tables]


def _read_device(table: dict[str, Any]) -> tuple[DeviceProfile, float]:
    known = {field.name.replace("_", "-"): field.name for field in fields(DeviceProfile)}
    settings = {key.replace("_", "-"): value for key, value in table.items()}
    share = settings.pop("share", 1.0)
    if not isinstance(share, (int, float)) or not share > 0:
        raise invalid("share", share, "be a positive number", "it is relative to the others")
    if unknown := sorted(set(settings) - set(known)):
        raise invalid("[[device]]", unknown, f"hold only {sorted(known)} and share", "rename it")
    for key, value in settings.items():
        if isinstance(value, str) != (key == "name"):
            raise invalid(key, value, "be a number (name: a text)", "correct the fleet file")
    return replace(DeviceProfile(), **{known[key]: settings[key] for key in settings}), float(share)
