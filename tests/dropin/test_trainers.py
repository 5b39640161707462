"""The node's half in Lightning and in Hugging Face's Trainer: steps, state, priorities."""

import numpy as np
import pytest
import torch
from node_toy import Node
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from flwr_hetero.mod import StepLoader, hetero
from flwr_hetero.sampler import (
    MercurySampler,
    PGDSampler,
    PriorityFeed,
    WeightedLoss,
    sample_priorities,
)

NUM, BATCH = 32, 4


class Examples(Dataset):
    """Examples as dictionaries, which know their place."""

    inputs = torch.randn(NUM, 6, generator=torch.manual_seed(0))

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return {"inputs": inputs, "labels": int(inputs[0] > 0), "index": index}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


class Training:
    """What a node has for a message: model, loader and loss."""

    def __init__(self, sampler, workers, folder, msg=None):
        self.model, self.msg, self.folder = net(), msg or {}, str(folder)
        self.sampler, self.steps = sampler(self.model), 0
        self.plain = DataLoader(Examples(), batch_sampler=self.sampler, num_workers=workers)
        self.loader, self.criterion = (
            hetero.batches(self.plain, self.msg),
            WeightedLoss(self.sampler),
        )

    def loss(self, batch):
        self.steps += 1
        return self.criterion(self.model(batch["inputs"]), batch["labels"])


def loop(training, epochs=1, accumulate=1):
    """Train by hand; the steps that a gradient is accumulated over share it."""
    optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
    for _ in range(epochs):
        for number, batch in enumerate(training.loader, 1):
            (training.loss(batch) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


def lightning(training, epochs=1, accumulate=1, **options):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = training.model

        def training_step(self, batch, _):
            return training.loss(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    pytorch_lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=training.folder,
        accumulate_grad_batches=accumulate, **quiet, **options
    ).fit(Module(), training.loader)  # fmt: skip


def hugging_face(training, epochs=1, accumulate=1, *, prepared=False, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            if prepared:  # its loader draws a batch ahead
                ahead = self.accelerator.prepare(training.plain)
                training.loader = StepLoader(ahead, training.msg)
            return training.loader

        def compute_loss(self, model, inputs, return_outputs=False, **_):
            return training.loss(inputs)

    settings = transformers.TrainingArguments(
        training.folder, num_train_epochs=epochs, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, gradient_accumulation_steps=accumulate, **options,
    )  # fmt: skip
    Trainer(training.model, settings).train()


def prepared_hugging_face(training, epochs=1, accumulate=1):
    hugging_face(training, epochs, accumulate, prepared=True)


TRAINERS = [loop, lightning, hugging_face, prepared_hugging_face]
theirs = pytest.mark.filterwarnings("ignore")


def mercury(model):
    return MercurySampler(NUM, BATCH, scores="loss")


def node_with(fit, done, folder, workers=0):
    """Make a node that trains with a trainer, and notes what it did."""

    def train(msg, context):
        done.append(Training(mercury, workers, folder, msg))
        fit(done[-1])

    return Node(train)


@theirs
@pytest.mark.parametrize("num_steps", [None, 5, 13])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_take_the_steps_and_the_state_is_kept(fit, num_steps, workers, tmp_path):
    done = []
    node = node_with(fit, done, tmp_path, workers)
    for _ in range(2):
        work, wanted = node.work(num_steps), num_steps or NUM // BATCH
        assert done[-1].steps == work["num-steps"] == wanted
        assert work["examples-processed"] == wanted * BATCH
        kept, now = node.state(), done[-1].sampler.state_dict()
        assert all(np.array_equal(kept[key], now[key]) for key in now)
    assert now["steps"] >= 2 * wanted
    assert now["importance"].any()


@theirs
@pytest.mark.parametrize("fit", TRAINERS)
def test_more_epochs_than_steps(fit, tmp_path):
    done = []
    node = node_with(lambda training: fit(training, 3), done, tmp_path)
    assert node.work(11)["num-steps"] == done[0].steps == 11


def pgd(model):
    return PriorityFeed(PGDSampler(NUM, BATCH, rule="topk"), model, layers="all")


class Watched(Training):
    """A training that checks what PGD's sampler is told of each batch."""

    def __init__(self, workers, folder):
        super().__init__(pgd, workers, folder)
        self.trained, self.told, sampler = [], [], self.sampler.sampler
        self.update, sampler.update = sampler.update, self.learn

    def learn(self, indices, priorities, *more):
        batch, expected = self.trained[-1]
        self.told.append(batch)
        np.testing.assert_array_equal(indices, batch)
        np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-3)
        self.update(indices, priorities, *more)

    def loss(self, batch):
        losses = lambda outputs, targets: cross_entropy(outputs, targets, reduction="none")  # noqa: E731
        expected = sample_priorities(
            self.model, losses, batch["inputs"], batch["labels"], self.sampler.gradient.direction
        )
        self.trained.append((batch["index"].numpy(), expected.numpy()))
        return super().loss(batch)


@theirs
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_measure_every_batch(fit, workers, accumulation, tmp_path):
    watched, epochs = Watched(workers, tmp_path), 2
    fit(watched, epochs, accumulation)
    assert len(watched.trained) == epochs * NUM // BATCH
    assert len(watched.told) == len(watched.trained) - 1  # the first has no direction to follow
    assert watched.sampler.summary()["coverage"] == 1.0


@theirs
@pytest.mark.parametrize(
    ("fit", "option"), [(lightning, {"precision": "bf16-mixed"}), (hugging_face, {"bf16": True})]
)
def test_bf16(fit, option, tmp_path):
    done = []
    node_with(lambda training: fit(training, **option), done, tmp_path).ask()
    assert done[0].sampler.state_dict()["importance"].any()
