"""The node's half in Lightning and in Hugging Face's Trainer: steps, state, orders, priorities."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader, follow, keep, load_state, timing
from flwr_hetero.sampler import (
    MercurySampler,
    OrderedSampler,
    PGDSampler,
    PriorityFeed,
    WeightedLoss,
    sample_priorities,
)
from flwr_hetero.strategy import CDGraB

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

    def __init__(self, make_sampler, workers, folder, msg=None, context=None):
        self.model, self.msg, self.folder = net(), msg or {}, str(folder)
        if msg is not None:
            self.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        self.sampler = make_sampler(self.model)
        if isinstance(self.sampler, OrderedSampler):
            follow(self.sampler, msg, context, self.model)
        elif context is not None:
            keep(self.sampler, context)
        self.plain = DataLoader(Examples(), batch_sampler=self.sampler, num_workers=workers)
        self.loader = StepLoader(self.plain, self.msg)
        self.criterion, self.steps = WeightedLoss(self.sampler), 0

    def loss(self, batch):
        self.steps += 1
        return self.criterion(self.model(batch["inputs"]), batch["labels"])

    def reply(self):
        arrays = ArrayRecord(self.model.state_dict())
        metrics = MetricRecord({"num-examples": NUM, **self.loader.metrics})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=self.msg)


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
SAMPLERS = {
    "mercury": lambda model: MercurySampler(NUM, BATCH, scores="loss"),
    "orders": lambda model: OrderedSampler(NUM, BATCH),
    "pgd": lambda model: PriorityFeed(PGDSampler(NUM, BATCH, rule="topk"), model, layers="all"),
}


def grid_of(fit, sampler, done, folder, *, workers=0, mods=(timing,), num_nodes=1):
    """Make nodes that train with a trainer, and note what they did."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(msg, context):
        done.append(Training(SAMPLERS[sampler], workers, folder, msg, context))
        fit(done[-1])
        return done[-1].reply()

    return LocalGrid(app, [DeviceProfile()] * num_nodes)


def ask(grid, num_steps=None):
    config = ConfigRecord({} if num_steps is None else {"num-steps": num_steps})
    content = RecordDict({"arrays": ArrayRecord(net().state_dict()), "config": config})
    (reply,) = grid.send_and_receive([Message(content, *grid.get_node_ids(), "train")])
    assert not reply.has_error(), reply.error.reason
    return reply.content["metrics"]


@theirs
@pytest.mark.parametrize("num_steps", [None, 5, 13])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_take_the_steps_and_the_state_is_kept(fit, num_steps, workers, tmp_path):
    done = []
    grid = grid_of(fit, "mercury", done, tmp_path, workers=workers)
    for _ in range(2):
        metrics, wanted = ask(grid, num_steps), num_steps or NUM // BATCH
        assert done[-1].steps == wanted
        assert (metrics["num-steps"], metrics["examples-processed"]) == (wanted, wanted * BATCH)
        kept = load_state(grid.context(*grid.get_node_ids()), "sampler")
        now = done[-1].sampler.state_dict()
        assert all(np.array_equal(kept[key], now[key]) for key in now)
    assert now["steps"] >= 2 * wanted
    assert now["importance"].any()


@theirs
@pytest.mark.parametrize("fit", TRAINERS)
def test_more_epochs_than_steps(fit, tmp_path):
    done = []
    metrics = ask(grid_of(lambda training: fit(training, 3), "mercury", done, tmp_path), 11)
    assert done[0].steps == metrics["num-steps"] == 11


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mods", [[], [timing]])
def test_what_is_learnt_in_the_steps_asked_for_is_kept(mods, workers, tmp_path):
    done = []
    grid = grid_of(loop, "pgd", done, tmp_path, workers=workers, mods=mods)
    for number in (1, 2, 3):
        ask(grid, 9)
        feed = done[-1].sampler
        # the very first batch has no gradient to follow
        assert feed.sampler.iteration == feed.state_dict()["batches"] - 1 == 9 * number - 1
    scalars = grid.context(*grid.get_node_ids()).state["flwr-hetero.sampler.scalars"]
    assert scalars["batches"] == 27


@theirs
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_learn_orders(fit, workers, tmp_path):
    done, lines = [], []
    grid = grid_of(fit, "orders", done, tmp_path, workers=workers, num_nodes=2)
    strategy = CDGraB(FedAvg(fraction_evaluate=0.0), sketch_size=64)
    strategy.on_round_end = lambda *found: lines.append(found[-1])
    strategy.start(
        grid,
        ArrayRecord(net().state_dict()),
        num_rounds=3,
        train_config=ConfigRecord({"num-steps": 8}),
    )
    assert [line["cd_grab"]["pairs"] for line in lines[1:]] == [8, 8, 8]
    orders = [training.sampler.node_order.order.tolist() for training in done]
    assert len({tuple(order) for order in orders}) > 2


class Watched(Training):
    """A training that checks what PGD's sampler is told of each batch."""

    def __init__(self, workers, folder):
        super().__init__(SAMPLERS["pgd"], workers, folder)
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
    ask(grid_of(lambda training: fit(training, **option), "mercury", done, tmp_path))
    assert done[0].sampler.state_dict()["importance"].any()
