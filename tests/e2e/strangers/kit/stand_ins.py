"""Small data and models in place of what the apps download: made on the spot, easy to learn."""

import random
import sys
from functools import cache

import numpy as np


def seed(number):
    """Seed the global generators."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (the one that apps use)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def images(count, rng, size=32, channels=3, classes=10, image="img", label="label", blocks=4):
    """Make noisy pictures of as many prototypes as there are classes, of so many blocks a side."""
    from PIL import Image

    shape = (blocks, blocks) if channels == 1 else (blocks, blocks, channels)
    prototypes = np.random.default_rng(0).integers(0, 256, (classes, *shape))
    labels = rng.integers(0, classes, count)
    pictures = []
    for number in labels:
        noisy = prototypes[number] + rng.normal(0, 40, shape)
        small = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        pictures.append(small.resize((size, size), Image.Resampling.NEAREST))
    return {image: pictures, label: labels.tolist()}


def digits(count, rng):
    """Make pictures as MNIST has them."""
    return images(count, rng, size=28, channels=1, image="image")


def flowers(count, rng):
    """Make larger pictures, with their names as Hugging Face's set of flowers has them."""
    return images(count, rng, size=64, classes=4, image="image", blocks=1)


def iris(count, rng):
    """Take scikit-learn's own iris data, in any order; ``count`` does not matter."""
    from sklearn.datasets import load_iris

    found = load_iris()
    order = rng.permutation(len(found.target))
    names = ("sepal_length", "sepal_width", "petal_length", "petal_width")
    columns = dict(zip(names, found.data[order].T.tolist(), strict=True))
    return columns | {"species": found.target[order].tolist()}


def texts(count, rng):
    """Make texts of which the words tell the class."""
    labels = rng.integers(0, 2, count)
    vocabulary = [WORDS[:20], WORDS[20:]]
    made = [" ".join(rng.choice(vocabulary[number], 12)) for number in labels]
    return {"text": made, "label": labels.tolist()}


def payments(count, rng):
    """Make bank transfers, one in eight a fraud."""
    fraud = (rng.random(count) < 0.125).astype(int)
    amount = rng.gamma(2.0, 100.0, count) * (1 + 20 * fraud)
    old = rng.gamma(2.0, 500.0, count)
    return {
        "step": rng.integers(1, 700, count).tolist(),
        "type": np.where(fraud, "TRANSFER", rng.choice(["PAYMENT", "CASH_IN"], count)).tolist(),
        "amount": amount.tolist(),
        "oldbalanceOrg": old.tolist(),
        "newbalanceOrig": np.maximum(0.0, old - amount).tolist(),
        "oldbalanceDest": rng.gamma(2.0, 500.0, count).tolist(),
        "newbalanceDest": rng.gamma(2.0, 500.0, count).tolist(),
        "isFraud": fraud.tolist(),
        "BankID": rng.integers(0, 4, count).tolist(),
    }


def census(count, rng):
    """Make rows as the census of adult incomes has them: 14 columns and what is earned."""
    numbers = {f"number-{i}": rng.normal(0, 1, count).tolist() for i in range(6)}
    words = {f"word-{i}": rng.choice(["a", "b", "c"], count).tolist() for i in range(8)}
    rich = np.asarray(numbers["number-0"]) + np.asarray(numbers["number-1"]) > 0
    return numbers | words | {"income": np.where(rich, ">50K", "<=50K").tolist()}


def talks(count, rng):
    """Make questions with one answer each, of four clients."""
    made = []
    for number in rng.integers(0, 8, count):
        question = {"role": "user", "content": f"good{number} good{number} bad1 ?"}
        made.append([question, {"role": "assistant", "content": f"bad{number} good{number}"}])
    return {"messages": made, "client_id": [i % 4 for i in range(count)]}


KINDS = {
    "uoft-cs/cifar10": (images, 3840),
    "ylecun/mnist": (digits, 5120),
    "zalando-datasets/fashion_mnist": (digits, 5120),
    "nelorth/oxford-flowers": (flowers, 1024),
    "hitorilabs/iris": (iris, 150),
    "stanfordnlp/imdb": (texts, 1280),
    "flwrlabs/fed-fraud-paysim-banks": (payments, 2560),
    "scikit-learn/adult-census-income": (census, 5120),
    "flwrlabs/fed-legal": (talks, 256),
}
"""The data set that an app asks for: what makes it, and how many examples are to train on."""


@cache
def made(path):
    """Make a data set, the same in each process."""
    from datasets import Dataset, DatasetDict

    make, count = KINDS[path]
    sizes = {"train": count, "test": max(64, count // 4)}
    rngs = np.random.default_rng(1).spawn(2)
    return DatasetDict(
        {
            name: Dataset.from_dict(make(size, rng))
            for (name, size), rng in zip(sizes.items(), rngs, strict=True)
        }
    )


def load(path, *_args, split=None, **_kwargs):
    """Stand in for ``datasets.load_dataset``."""
    return made(path) if split is None else made(path)[split]


def small_vit(**_):
    """Make a vision transformer that trains on a CPU; its body is the same in each process."""
    import torch
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VisionTransformer(image_size=224, patch_size=56, **sizes)


WORDS = [f"{kind}{i}" for kind in ("bad", "good") for i in range(20)]
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def tokenizer(*_, **__):
    """Make a tokenizer of the few words of :func:`texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "?", "user", "assistant", *WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"},
        **{"sep_token": "[SEP]", "eos_token": "[SEP]", "chat_template": CHAT},
        **{"model_max_length": 64, "model_input_names": ["input_ids", "attention_mask"]},
    )


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "pad_token_id": 0}
MODELS = {"bert-tiny": "Bert", "ModernBERT": "ModernBert", "SmolLM": "Llama"}
"""Part of a model's name, and of which kind it is."""


def model(auto):
    """Stand in for ``from_pretrained`` of a class: small, and the same in each process."""

    def made(name, num_labels=2, **_):
        import torch
        import transformers

        (kind,) = [kind for part, kind in MODELS.items() if part in name]
        config = getattr(transformers, f"{kind}Config")(**SIZES, num_labels=num_labels)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return auto.from_config(config)

    return made


class Accuracy:
    """Stand in for ``evaluate.load("accuracy")``."""

    def __init__(self, *_):
        self.right, self.all = 0, 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self):
        return {"accuracy": self.right / self.all}


def install(needs):
    """Put the stand-ins in place of what the app would load."""
    if "datasets" in needs:
        import datasets

        datasets.load_dataset = load
        datasets.disable_progress_bars()
    if "evaluate" in needs:
        sys.modules["evaluate"].load = Accuracy
    if "transformers" in needs:
        import transformers

        transformers.AutoTokenizer.from_pretrained = tokenizer
        for auto in ("AutoModelForSequenceClassification", "AutoModelForCausalLM"):
            kind = getattr(transformers, auto)
            kind.from_pretrained = model(kind)
    if "torchvision" in needs:
        import torchvision

        torchvision.models.vit_b_16 = small_vit
