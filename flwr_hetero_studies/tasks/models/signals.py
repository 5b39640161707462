"""Models for series and speech."""

import torch
from torch import Tensor, nn


class AutoregressiveMLP(nn.Module):
    """Predict the next value from a window, then move the window on by what was predicted."""

    def __init__(self, steps: int, horizon: int, width: int = 64) -> None:
        super().__init__()
        self.horizon = horizon
        self.layers = nn.Sequential(
            nn.Linear(steps, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, series: Tensor) -> Tensor:
        """Map series (batch, 1, steps) to their next values (batch, horizon)."""
        window, found = series.flatten(1), []
        for _ in range(self.horizon):
            found.append(self.layers(window))
            # its own forecast takes the place of the oldest value
            window = torch.cat([window[:, 1:], found[-1]], dim=1)
        return torch.cat(found, dim=1)


def speech_cnn(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two convolutions over time, of 32 and 64 channels, and the maximum over the frames."""
    return nn.Sequential(
        nn.Conv1d(shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True),
        nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(),
        nn.Linear(64, num_classes),
    )  # fmt: skip


def ar_mlp(shape: tuple[int, ...], outputs: tuple[int]) -> nn.Module:
    """Three layers, 64 wide, one step at a time (CD-GraB, appendix D.1)."""
    return AutoregressiveMLP(shape[1], outputs[0])
