import re
import tomllib
from dataclasses import fields
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from flwr_hetero.client.device import (
    DeviceProfile,
    compute_time_s,
    message_time_s,
    named_fleet,
    transfer_time_s,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fleet_of(tmp_path):
    """Give a function that makes a fleet by a TOML file."""

    def make(text, num_nodes=3):
        (path := tmp_path / "fleet.toml").write_text(text)
        return named_fleet(str(path), num_nodes)

    return make


def test_times_by_hand():
    device = DeviceProfile(2.0, uplink_mbps=1.0, downlink_mbps=4.0, seconds_per_example=0.03)
    assert compute_time_s(device, 10, 3) == pytest.approx((10 + 3 / 3) * 0.03 / 2)
    assert transfer_time_s(device, 1e6, 5e5) == pytest.approx(8 / 4 + 4 / 1)
    assert transfer_time_s(DeviceProfile(), 1e9, 1e9) == 0.0
    assert message_time_s(DeviceProfile(0.1, wait_s=3.7, start_s=2.3)) == pytest.approx(3.7 + 23.0)
    assert message_time_s(DeviceProfile()) == 0.0
    assert message_time_s(DeviceProfile(wait_s=1.0, poll_s=3.0)) == 2.5  # the mean


def test_an_instruction_comes_at_any_moment_between_two_polls():
    device = DeviceProfile(wait_s=1.0, poll_s=3.0)
    rng = np.random.default_rng(1)
    times_s = np.sort([message_time_s(device, rng) for _ in range(2000)])
    assert times_s == pytest.approx(np.linspace(1.0, 4.0, 2000), abs=0.15)


def test_nothing_is_drawn_for_a_device_that_does_not_poll():
    rng = np.random.default_rng(1)
    assert message_time_s(DeviceProfile(wait_s=1.0), rng) == 1.0
    assert rng.random() == np.random.default_rng(1).random()


def test_jitter_has_the_stated_spread():
    device = DeviceProfile(jitter=0.2)
    rng = np.random.default_rng(1)
    logs = np.log([compute_time_s(device, 100, rng=rng) for _ in range(2000)])
    assert np.std(logs) == pytest.approx(0.2, abs=0.015)  # about 4 standard errors
    assert np.mean(logs) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, bad) for name in ("compute_factor", "seconds_per_example") for bad in (0, nan)],
        *[(name, bad) for name in ("uplink_mbps", "downlink_mbps") for bad in (0.0, nan)],
        *[("jitter", -0.1), ("availability", 1.1), ("availability", -0.1)],
        *[(name, bad) for name in ("wait_s", "start_s", "poll_s") for bad in (-0.1, inf)],
    ],
)
def test_profile_refusals(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a number in"):
        DeviceProfile(**{field: value})


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("", "at least one"),
        ("[[device]]\nspeed = 2", r"\[\[device\]\] must be one of .*compute_factor.*'speed'"),
        ("[[device]]\ncompute-factor = 0", "compute_factor must be a number"),
        ("[[device]]\ncompute-factor = 'fast'", "compute_factor must be a number"),
        ("[[device]]\nshare = -1", "share must be a number"),
        ("[[device]]\nwait-s = -1", "wait_s must be a number"),
        ("[[device]]\nstart-s = '2 s'", "start_s must be a number"),
        ("[[device", "valid TOML"),
    ],
)
def test_fleet_file_refusals(fleet_of, toml, message):
    with pytest.raises(ValueError, match=message):
        fleet_of(toml)


def test_named_fleet_refusals():
    with pytest.raises(ValueError, match=r"fleet must be a known name .*'moon'.*absolute"):
        named_fleet("moon", 3)
    with pytest.raises(ValueError, match="num_nodes"):
        named_fleet("uniform", 0)


def test_guide_names_every_field(fleet_of):
    guides = [*ROOT.glob("apps/tifl/README.md"), *ROOT.glob("flwr_hetero/tifl/README.md")]
    guide = "".join(path.read_text() for path in guides)
    [text] = re.findall(r"```toml\n(\[\[device\]\].+?)```", guide, re.DOTALL)
    named = set(tomllib.loads(text)["device"][0])
    assert named == {field.name.replace("_", "-") for field in fields(DeviceProfile)} | {"share"}
    assert fleet_of(text, 2)[0].name == "Jetson Orin Nano"


def test_kinds_of_devices_have_nodes_by_share_and_one_at_least(fleet_of):
    assert [len(named_fleet("paper-5", n)) for n in range(1, 12)] == list(range(1, 12))
    fast = "[[device]]\ncompute-factor = 2.0\nshare = 3\n"
    fleet = fleet_of(fast + "[[device]]\nuplink_mbps = 5.0\nname = 'x'", 8)
    assert fleet == [DeviceProfile(2.0)] * 6 + [DeviceProfile(uplink_mbps=5.0, name="x")] * 2
    assert [device.name for device in named_fleet("gpu-cpu", 2)] == ["GPU", "CPU"]
    assert [device.name for device in named_fleet("gpu-cpu", 5)] == ["GPU"] * 4 + ["CPU"]
    kinds = (f"[[device]]\ncompute-factor = {i + 1}\nshare = {10**i}\n" for i in range(3))
    assert [device.compute_factor for device in fleet_of("".join(kinds), 4)] == [1, 2, 3, 3]
