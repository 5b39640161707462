import pytest

from flwr_hetero import strategy as ours
from flwr_hetero_studies import rivals


@pytest.mark.parametrize(
    ("rival", "settings", "text"),
    [
        ("AdaComm", {"first_steps": 0}, "first_steps must be"),
        ("DeadlineSelection", {"deadline_s": 0.0}, "deadline_s must be"),
        ("FedAT", {"clients_per_round": 0}, "clients_per_round must be"),
        ("FedAT", {"strategy": rivals.FedAT()}, "leave .*selection.* to FedAT"),
        ("FedAsync", {"mixing": 1.1}, "mixing must be"),
        ("FedCompass", {"min_steps": 9, "max_steps": 8}, "max_steps must be .*min_steps"),
        ("Oort", {"pace": 0.0}, "pace must be"),
        ("FedNova", {"step_correction": 0.5}, "step_correction must be left out: FedNova's is 1"),
        ("OverSelect", {"take": 0}, "take must be a whole number"),
        ("OverSelect", {"strategy": ours.Wrapper(ours.TiFL())}, "time nodes before .* inside"),
        ("OverSelect", {"strategy": ours.FedBuff()}, "leave waiting to OverSelect"),
        ("PowerOfChoice", {"candidates": 4}, "candidates must be .*clients_per_round"),
        ("RescaledASGD", {"server_rate": 0.0}, "server_rate must be"),
        ("RingleaderASGD", {"server_rate": -1.0}, "server_rate must be"),
        ("RingleaderASGD", {"concurrency": 0}, "concurrency must be"),
        ("WithoutSlowest", {"left_out": 1.0}, "left_out must be"),
    ],
)
def test_settings_are_checked(rival, settings, text):
    with pytest.raises(ValueError, match=text):
        getattr(rivals, rival)(**settings)
