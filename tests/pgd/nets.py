"""Models and data that the tests of PGD share."""

import torch
from torch import nn

LOSS = nn.CrossEntropyLoss(reduction="none")
NUM = 24


class Tied(nn.Module):
    """Embedding and head share one parameter; the embedding is used twice."""

    def __init__(self, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(5, 6, padding_idx)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.embed(words[:, :2]).sum(1) + 2 * self.embed(words[:, 2:]).sum(1))


def image_net():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 3, 2, bias=False), nn.LayerNorm(9), nn.BatchNorm2d(3)),
        *(nn.Flatten(), nn.Linear(243, 7), nn.RMSNorm(7), nn.Tanh(), nn.Linear(7, 5)),
    )


def data(model):
    targets = torch.arange(NUM) % 5
    if isinstance(model, Tied):
        return torch.randint(5, (NUM, 4)), targets
    return torch.randn(NUM, 1, 8, 8), targets


def some_direction(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}
