"""The cost model of an emulated device: compute, link, jitter, availability."""

from dataclasses import dataclass
from math import inf, isfinite, isnan

import numpy as np

from flwr_hetero.core.errors import invalid

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
    """Time a device computes for, in seconds.

    Parameters
    ----------
    profile : DeviceProfile
        The device.
    processed : float
        Examples that go forward and backward.
    scored : float
        Examples that go forward only.
    rng : np.random.Generator, optional
        Source of jitter; one normal draw if the profile has jitter. None: no jitter.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> compute_time_s(DeviceProfile(compute_factor=2.0, seconds_per_example=0.1), 30)
    1.5
    """
    work = processed + FORWARD_SHARE * scored
    time_s = work * profile.seconds_per_example / profile.compute_factor
    if rng is not None and profile.jitter:
        time_s *= float(np.exp(profile.jitter * rng.standard_normal()))
    return time_s


def transfer_time_s(profile: DeviceProfile, bytes_down: float, bytes_up: float) -> float:
    """Time a device's link needs for one instruction and its reply, in seconds.

    Parameters
    ----------
    profile : DeviceProfile
        The device.
    bytes_down, bytes_up : float
        Payload of the instruction and of the reply, in bytes.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> transfer_time_s(DeviceProfile(uplink_mbps=8.0), bytes_down=10**9, bytes_up=2_000_000)
    2.0
    """
    return 8e-6 * (bytes_down / profile.downlink_mbps + bytes_up / profile.uplink_mbps)
