"""Model, data and the trainer's arguments."""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments


def make_model():
    """Make a tiny BERT with random weights that reads a digit pixel by pixel."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=17, intermediate_size=32, max_position_embeddings=64, num_labels=10, **sizes
    )
    return BertForSequenceClassification(config)


def load_data(partition_id, num_partitions):
    """Give a node its own part of the digits."""
    digits = load_digits()
    mine = torch.arange(partition_id + 40, 200, num_partitions)
    pixels = torch.tensor(digits.data).long()
    labels = torch.tensor(digits.target)
    return [{"input_ids": pixels[i], "labels": labels[i]} for i in mine]


def make_arguments():
    """Ask for one epoch and for no files."""
    return TrainingArguments(
        tempfile.gettempdir(),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
