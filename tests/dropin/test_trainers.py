"""The node's half in Lightning and in Hugging Face's Trainer: steps, state and orders."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flwr_hetero.fleet import DeviceProfile, LocalGrid
from flwr_hetero.mod import StepLoader, follow, keep, load_state, timing
from flwr_hetero.sampler import MercurySampler, OrderedSampler, WeightedLoss
from flwr_hetero.strategy import CDGraB

NUM, BATCH = 32, 4


class Examples(Dataset):
    """Examples as dictionaries."""

    inputs = torch.randn(NUM, 6, generator=torch.manual_seed(0))

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": index % 2}


class Training:
    """What a node has for a message: model, loader and loss."""

    def __init__(self, sampler, msg, context, workers, folder):
        self.model, self.sampler, self.folder = nn.Linear(6, 2), sampler, str(folder)
        self.model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        if isinstance(sampler, OrderedSampler):
            follow(sampler, msg, context, self.model)
        else:
            keep(sampler, context)
        self.plain = DataLoader(Examples(), batch_sampler=sampler, num_workers=workers)
        self.loader = StepLoader(self.plain, msg)
        self.msg, self.criterion, self.steps = msg, WeightedLoss(sampler), 0

    def loss(self, batch):
        self.steps += 1
        return self.criterion(self.model(batch["inputs"]), batch["labels"])

    def reply(self):
        arrays = ArrayRecord(self.model.state_dict())
        metrics = MetricRecord({"num-examples": NUM, **self.loader.metrics})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=self.msg)


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
        max_epochs=epochs, accelerator="cpu", default_root_dir=training.folder, **quiet, **options
    ).fit(Module(), training.loader)


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


def prepared_hugging_face(training, epochs=1, **options):
    hugging_face(training, epochs, prepared=True, **options)


TRAINERS = [lightning, hugging_face, prepared_hugging_face]
theirs = pytest.mark.filterwarnings("ignore")


def node_app(fit, make_sampler, done, folder, workers=0):
    """Make a ClientApp that trains with a trainer, and notes what it did."""
    app = ClientApp(mods=[timing])

    @app.train()
    def train(msg, context):
        training = Training(make_sampler(), msg, context, workers, folder)
        fit(training)
        done.append(training)
        return training.reply()

    return app


def initial():
    torch.manual_seed(0)
    return ArrayRecord(nn.Linear(6, 2).state_dict())


@theirs
@pytest.mark.parametrize("num_steps", [None, 5, 13])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_take_the_steps_and_the_state_is_kept(fit, num_steps, workers, tmp_path):
    done = []
    sampler = lambda: MercurySampler(NUM, BATCH, scores="loss")  # noqa: E731
    grid = LocalGrid(node_app(fit, sampler, done, tmp_path, workers), [DeviceProfile()])
    (node,) = grid.get_node_ids()
    for _ in range(2):
        config = ConfigRecord({} if num_steps is None else {"num-steps": num_steps})
        content = RecordDict({"arrays": initial(), "config": config})
        (reply,) = grid.send_and_receive([Message(content, node, "train")])
        assert not reply.has_error(), reply.error.reason
        wanted = num_steps or NUM // BATCH
        assert done[-1].steps == wanted
        metrics = reply.content["metrics"]
        assert (metrics["num-steps"], metrics["examples-processed"]) == (wanted, wanted * BATCH)
        kept = load_state(grid.context(node), "sampler")
        now = done[-1].sampler.state_dict()
        assert all(np.array_equal(kept[key], now[key]) for key in now)
    assert now["steps"] >= 2 * wanted
    assert now["importance"].any()


@theirs
@pytest.mark.parametrize("fit", TRAINERS)
def test_more_epochs_than_steps(fit, tmp_path):
    done = []
    app = node_app(
        lambda training: fit(training, 3), lambda: MercurySampler(NUM, BATCH), done, tmp_path
    )
    grid = LocalGrid(app, [DeviceProfile()])
    content = RecordDict({"arrays": initial(), "config": ConfigRecord({"num-steps": 11})})
    (reply,) = grid.send_and_receive([Message(content, *grid.get_node_ids(), "train")])
    assert not reply.has_error(), reply.error.reason
    assert done[0].steps == reply.content["metrics"]["num-steps"] == 11


@theirs
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", TRAINERS)
def test_trainers_learn_orders(fit, workers, tmp_path):
    done, lines = [], []
    app = node_app(fit, lambda: OrderedSampler(NUM, BATCH), done, tmp_path, workers)
    grid = LocalGrid(app, [DeviceProfile()] * 2)
    strategy = CDGraB(FedAvg(fraction_evaluate=0.0), sketch_size=64)
    strategy.on_round_end = lambda run, record: lines.append(record)
    strategy.start(grid, initial(), num_rounds=3, train_config=ConfigRecord({"num-steps": 8}))
    assert [line["cd-grab"]["pairs"] for line in lines[1:]] == [8, 8, 8]
    orders = [training.sampler.node_order.order.tolist() for training in done]
    assert len({tuple(order) for order in orders}) > 2


@theirs
def test_bf16(tmp_path):
    for fit, option in ((lightning, {"precision": "bf16-mixed"}), (hugging_face, {"bf16": True})):
        done = []
        app = node_app(
            lambda training, fit=fit, option=option: fit(training, **option),
            lambda: MercurySampler(NUM, BATCH), done, tmp_path,
        )  # fmt: skip
        grid = LocalGrid(app, [DeviceProfile()])
        content = RecordDict({"arrays": initial(), "config": ConfigRecord()})
        (reply,) = grid.send_and_receive([Message(content, *grid.get_node_ids(), "train")])
        assert not reply.has_error(), reply.error.reason
        assert done[0].sampler.state_dict()["importance"].any()
