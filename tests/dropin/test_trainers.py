"""The node's half in Lightning and in Hugging Face's Trainer: steps and state."""

import numpy as np
import pytest
import torch
from node_toy import Node
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flwr_hetero.mod import StepLoader, hetero
from flwr_hetero.sampler import MercurySampler, WeightedLoss

NUM, BATCH = 32, 4


class Examples(Dataset):
    """Examples as dictionaries."""

    inputs = torch.randn(NUM, 6, generator=torch.manual_seed(0))

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return {"inputs": inputs, "labels": int(inputs[0] > 0)}


class Training:
    """What a node has for a message: model, loader and loss."""

    def __init__(self, workers, folder, msg):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.msg, self.folder = msg, str(folder)
        self.sampler, self.steps = MercurySampler(NUM, BATCH, scores="loss"), 0
        self.plain = DataLoader(Examples(), batch_sampler=self.sampler, num_workers=workers)
        self.loader, self.criterion = (
            hetero.batches(self.plain, self.msg),
            WeightedLoss(self.sampler),
        )

    def loss(self, batch):
        self.steps += 1
        return self.criterion(self.model(batch["inputs"]), batch["labels"])


def loop(training, epochs=1):
    optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
    for _ in range(epochs):
        for batch in training.loader:
            training.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def lightning(training, epochs=1, **options):
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
        **quiet, **options
    ).fit(Module(), training.loader)  # fmt: skip


def hugging_face(training, epochs=1, *, prepared=False, **options):
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
        disable_tqdm=True, **options,
    )  # fmt: skip
    Trainer(training.model, settings).train()


def prepared_hugging_face(training, epochs=1):
    hugging_face(training, epochs, prepared=True)


TRAINERS = [loop, lightning, hugging_face, prepared_hugging_face]
theirs = pytest.mark.filterwarnings("ignore")


def node_with(fit, done, folder, workers=0):
    """Make a node that trains with a trainer, and notes what it did."""

    def train(msg, context):
        done.append(Training(workers, folder, msg))
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


@theirs
@pytest.mark.parametrize(
    ("fit", "option"), [(lightning, {"precision": "bf16-mixed"}), (hugging_face, {"bf16": True})]
)
def test_bf16(fit, option, tmp_path):
    done = []
    node_with(lambda training: fit(training, **option), done, tmp_path).ask()
    assert done[0].sampler.state_dict()["importance"].any()
