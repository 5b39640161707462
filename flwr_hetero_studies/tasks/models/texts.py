"""Models for texts: a class of the text, or logits of the next character at each place."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from flwr_hetero_studies.tasks.texts import VOCABULARY

WIDTH = 64
HEADS = 2
LAYERS = 2


class Bag(nn.Module):
    """Linear in the sum of the tokens' embeddings, over the square root of their number."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.output = nn.Linear(width, num_classes)
        with torch.no_grad():
            # With the usual N(0, 1) a linear model learns slowly.
            self.embedding.weight *= 0.2

    def forward(self, numbers: Tensor) -> Tensor:
        # An empty text has no token.
        count = (numbers != 0).sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.output(self.embedding(numbers).sum(1) / count.sqrt())
        return logits


class LSTMLanguageModel(nn.Module):
    """Two layers of LSTM, with one embedding for inputs and outputs.

    PGD's priorities count the parameters of the head. They cannot count those of the embedding,
    which is used in two places.
    """

    def __init__(self, characters: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, LAYERS, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.head(self.lstm(self.embedding(numbers))[0])
        return linear(found, self.embedding.weight)


class TransformerBlock(nn.Module):
    """A layer of a transformer: attention to earlier places, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.narrow(self.widen(self.between(x)).relu()))


class GPT(nn.Module):
    """A small decoder-only transformer with normalisation before each layer."""

    def __init__(self, length: int, characters: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, characters)

    def forward(self, numbers: Tensor) -> Tensor:
        # Places are repeated for each example, as its own gradient is needed.
        places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
        found = self.blocks(self.embedding(numbers) + self.places(places))
        return cast(Tensor, self.output(self.norm(found)))


def lstm_lm(shape: tuple[int, ...], outputs: tuple[int, int]) -> nn.Module:
    """Two LSTM layers with a tied embedding, 64 wide (CD-GraB, appendix D.1, with 32)."""
    return scaled(LSTMLanguageModel(outputs[1]))


def gpt(shape: tuple[int, ...], outputs: tuple[int, int]) -> nn.Module:
    """Two transformer layers of two heads, 64 wide (CD-GraB, appendix D.2, with 128)."""
    return scaled(GPT(*outputs))


def scaled(model: nn.Module) -> nn.Module:
    """Scale embeddings to N(0, 0.1^2): with tied ones of N(0, 1) the first loss is large."""
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Embedding):
                layer.weight *= 0.1
    return model


bag = Bag
