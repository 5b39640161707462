"""The cost model of an emulated device, and named fleets of such devices."""

import tomllib
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path

import numpy as np
from numpy.random import Generator

from flwr_hetero.errors import check_choice, check_count, check_number, invalid

FORWARD_SHARE = 1 / 3
"""Cost of a forward pass alone, as a share of forward plus backward."""
READING_SHARE = 0.1
"""Cost of reading a batch's gradient, as such a share; measured on the CPU: 0.02 to 0.34."""
REAL = "real"
"""The fleet that is not emulated: real devices, real clocks."""


@dataclass(frozen=True)
class DeviceProfile:
    """One kind of device, relative to a reference device: ``DeviceProfile(compute_factor=4.0)``.

    Parameters
    ----------
    compute_factor : float
        Speed relative to the reference device: 2 is twice as fast.
    uplink_mbps, downlink_mbps : float
        Link speed in Mbit/s; infinite means that transfers cost nothing.
    jitter, availability : float
        Standard deviation of the logarithm of compute time; probability of any answer to a message.
    seconds_per_example : float
        Time of the reference device for one example, forward and backward.
    wait_s, start_s, poll_s : float
        Cost of each message in seconds, apart from its work and its transfer. ``wait_s`` is for
        round trips, which are the same on each device. ``start_s`` is for the start and the reading
        of data on the reference device. ``poll_s`` is the pause between two requests of a node for
        work: an instruction waits for the next one, which comes after a random part of the pause.
    """

    compute_factor: float = 1.0
    uplink_mbps: float = inf
    downlink_mbps: float = inf
    jitter: float = 0.0
    availability: float = 1.0
    seconds_per_example: float = 0.01
    wait_s: float = 0.0
    start_s: float = 0.0
    poll_s: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("compute_factor", "seconds_per_example"):
            check_number(name, getattr(self, name), "(0, inf)")
        for name in ("jitter", "wait_s", "start_s", "poll_s"):
            check_number(name, getattr(self, name), "[0, inf)")
        check_number("availability", self.availability, "[0, 1]")
        for name in ("uplink_mbps", "downlink_mbps"):
            # An infinitely fast link costs nothing.
            mbps = getattr(self, name)
            if mbps != inf:
                check_number(name, mbps, "(0, inf]")


def compute_time_s(
    profile: DeviceProfile, processed: float, scored: float = 0.0, rng: Generator | None = None
) -> float:
    """Compute time of a device in seconds, for examples trained on and examples only scored."""
    work = processed + FORWARD_SHARE * scored
    time_s = work * profile.seconds_per_example / profile.compute_factor
    if rng is not None and profile.jitter:
        time_s *= float(np.exp(profile.jitter * rng.standard_normal()))
    return time_s


def reading_cost(examples: int) -> int:
    """Return what reading a batch's gradient costs, in examples only scored."""
    return round(examples * READING_SHARE / FORWARD_SHARE)


def transfer_time_s(profile: DeviceProfile, bytes_down: float, bytes_up: float) -> float:
    """Transfer time of an instruction and its reply, in seconds."""
    return 8e-6 * (bytes_down / profile.downlink_mbps + bytes_up / profile.uplink_mbps)


def message_time_s(profile: DeviceProfile, rng: Generator | None = None) -> float:
    """Return the cost of a message besides its work, in seconds; its mean if ``rng`` is None."""
    cost_s = profile.wait_s + profile.start_s / profile.compute_factor
    if profile.poll_s:
        cost_s += profile.poll_s * (0.5 if rng is None else float(rng.random()))
    return cost_s


# Such that the small CNN for 28x28 images (82 kB) computes and transfers in the ratio of the
# paper's ResNet-18 (45 MB; on a Jetson TX1 about half a second per batch of 32).
WIFI_SECONDS_PER_EXAMPLE = 3e-5


def _wifi(mbps: float) -> DeviceProfile:
    seconds = WIFI_SECONDS_PER_EXAMPLE
    return DeviceProfile(1.0, mbps, mbps, seconds_per_example=seconds, name=f"{mbps} Mbit/s")


NAMED_FLEETS: dict[str, list[tuple[DeviceProfile, float]]] = {
    "uniform": [(DeviceProfile(name="reference"), 1)],
    # TiFL, section 5.1: five equal groups of clients by CPUs
    "paper-5": [
        (DeviceProfile(cpus, name=f"{cpus:g} CPU"), 1) for cpus in (4.0, 2.0, 1.0, 0.5, 0.1)
    ],
    # Biased local SGD, section 5.1: the widest gap, gamma = 1/32
    "gpu-cpu": [(DeviceProfile(32.0, name="GPU"), 4), (DeviceProfile(name="CPU"), 1)],
    # Mercury, section 6.2: the bandwidths of its test bed, both ways
    **{f"wifi-{mbps}": [(_wifi(mbps), 1)] for mbps in (10, 50, 100, 200)},
}


def named_fleet(fleet: str, num_nodes: int) -> list[DeviceProfile]:
    """Assign a device profile to each node of a fleet: groups as large as their kind's share.

    Parameters
    ----------
    fleet : str
        A name in ``NAMED_FLEETS``, or the path of a TOML file with ``[[device]]`` tables of fields
        of :class:`DeviceProfile` and a relative ``share`` of the nodes (1); else ValueError.
    num_nodes : int
        Node i is the one with ``partition-id`` i.

    Examples
    --------
    >>> [device.compute_factor for device in named_fleet("paper-5", 10)]
    [4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1]
    """
    check_count("num_nodes", num_nodes, 1)
    kinds, shares = zip(*(NAMED_FLEETS.get(fleet) or _read_fleet(fleet)), strict=True)
    ends = [round(num_nodes * end / sum(shares)) for end in accumulate(shares)]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    # Each kind gets at least one node, if there are enough of them.
    while num_nodes >= len(sizes) and 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return [kind for kind, size in zip(kinds, sizes, strict=True) for _ in range(size)]


def _read_fleet(fleet: str) -> list[tuple[DeviceProfile, float]]:
    """Read the device tables of a TOML file, with the share of nodes of each."""
    path = Path(fleet).expanduser()
    if path.suffix != ".toml" or not path.is_file():
        names = ", ".join(sorted(NAMED_FLEETS))
        hint = f"the names are {names}; in a run-config the path must be absolute"
        raise invalid("fleet", fleet, "be a known name or an existing .toml file", hint)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("device")
    except tomllib.TOMLDecodeError as error:
        raise invalid("fleet", fleet, f"be valid TOML ({error})") from error
    if not isinstance(tables, list) or not tables:
        raise invalid("fleet", fleet, "hold at least one [[device]] table")
    known = ["share", *(field.name for field in fields(DeviceProfile))]
    kinds = []
    for table in tables:
        settings = {key.replace("-", "_"): value for key, value in table.items()}
        for key in settings:
            check_choice("[[device]]", key, known)
        share = check_number("share", settings.pop("share", 1.0), "(0, inf)")
        kinds.append((DeviceProfile(**settings), share))
    return kinds
