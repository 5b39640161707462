"""Models and data that the tests of PGD share."""

import torch
from torch import nn
from torch.nn.functional import linear

LOSS = nn.CrossEntropyLoss(reduction="none")
NUM = 24


class Tied(nn.Module):
    """Embedding and head share one parameter; the embedding is used twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.embed(words[:, :2]).sum(1) + 2 * self.embed(words[:, 2:]).sum(1))


class TiedByHand(nn.Module):
    """The embedding's matrix is the head's, outside any module."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, words):
        return linear(self.mix(self.embed(words).mean(1)).tanh(), self.embed.weight)


class TimeMajor(nn.Module):
    """Time comes first between embedding and head."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, words):
        return self.head(self.mix(self.embed(words).transpose(0, 1)).tanh().mean(0))


class Recurrent(nn.Module):
    """An LSTM, which has no forward mode, and a head: in time, or of flattened steps."""

    def __init__(self, flattens=False):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
        self.head, self.flattens = nn.Linear(6, 5), flattens

    def forward(self, words):
        steps, _ = self.lstm(self.embed(words))
        flat = self.head(steps.flatten(0, 1)).unflatten(0, words.shape)
        return (flat if self.flattens else self.head(steps)).mean(1)


def image_net():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 3, 2, bias=False), nn.LayerNorm(9), nn.BatchNorm2d(3)),
        *(nn.Flatten(), nn.Linear(243, 7), nn.RMSNorm(7), nn.Tanh(), nn.Linear(7, 5)),
    )


def small():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    return model, *data(model)


def data(model):
    targets = torch.arange(NUM) % 5
    if isinstance(model, Tied):
        return torch.randint(5, (NUM, 4)), targets
    return torch.randn(NUM, 1, 8, 8), targets


def some_direction(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}
