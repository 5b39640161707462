"""Model, adapters, data and training."""

from functools import cache

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

OF_BASE, RATE = 600, 5e-3


def read(numbers):
    """Read digits as images of one channel."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[numbers], torch.tensor(digits.target)[numbers]


@cache
def make_base():
    """Make a tiny transformer that has learned mirrored digits, in place of one from a hub."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, intermediate_size=128, num_labels=10, **sizes
    )
    model = ViTForImageClassification(config)
    images, labels = read(torch.arange(OF_BASE))
    data = DataLoader(TensorDataset(images.flip(3), labels), batch_size=32, shuffle=True)
    for _ in range(8):
        train(model, data, 3e-3)
    return config, model.state_dict()


def make_model():
    """Put adapters into the base; they and the classifier are what is trained."""
    config, weights = make_base()
    model = ViTForImageClassification(config)
    model.load_state_dict(weights)
    lora = LoraConfig(
        r=4, lora_alpha=16, target_modules="all-linear", modules_to_save=["classifier"]
    )
    return get_peft_model(model, lora)


def load_data(partition_id, num_partitions):
    """Give a node its own part of the digits, some of it for testing."""
    mine = torch.arange(OF_BASE + partition_id, len(load_digits().target), num_partitions)
    test = mine[::4]
    rest = mine[torch.arange(len(mine)) % 4 > 0]
    data = DataLoader(TensorDataset(*read(rest)), batch_size=8, shuffle=True)
    return data, *read(test)


def train(model, loader, rate=RATE):
    """Train what is not frozen."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, rate)
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(pixel_values=images).logits, labels).backward()
        optimizer.step()


def accuracy(model, images, labels):
    """Return the part of the images that are read correctly."""
    model.eval()
    with torch.no_grad():
        found = model(pixel_values=images).logits.argmax(1)
    return float((found == labels).float().mean())
