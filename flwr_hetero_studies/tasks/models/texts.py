"""Models that classify texts by the numbers of their tokens."""

import torch
from torch import Tensor, nn

from flwr_hetero_studies.tasks.texts import VOCABULARY


class Bag(nn.Module):
    """Linear in the sum of the tokens' embeddings, over the square root of their number."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = embedding(width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, numbers: Tensor) -> Tensor:
        # An empty text has no token.
        count = (numbers != 0).sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.output(self.embedding(numbers).sum(1) / count.sqrt())
        return logits


class TextCNN(nn.Module):
    """Convolution over three tokens and its maximum over the text (Kim, 2014)."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = embedding(width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.output = nn.Linear(width, num_classes)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.convolution(self.embedding(numbers).transpose(1, 2)).relu()
        logits: Tensor = self.output(found.amax(2))
        return logits


def embedding(width: int) -> nn.Embedding:
    """Make an embedding of tokens, in which padding is always 0."""
    layer = nn.Embedding(VOCABULARY, width, padding_idx=0)
    with torch.no_grad():
        # With the usual N(0, 1) a linear model learns slowly.
        layer.weight *= 0.2
    return layer


bag = Bag
textcnn = TextCNN
