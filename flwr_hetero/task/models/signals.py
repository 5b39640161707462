"""Models for series."""

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
            window = torch.cat([window[:, 1:], found[-1]], dim=1)
        return torch.cat(found, dim=1)


def ar_mlp(shape: tuple[int, ...], outputs: tuple[int]) -> nn.Module:
    """Three layers, 64 wide, one step at a time (CD-GraB, appendix D.1)."""
    return AutoregressiveMLP(shape[1], outputs[0])
