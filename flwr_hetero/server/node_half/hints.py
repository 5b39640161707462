"""The lines that a ClientApp lacks, for the framework that it is written in."""

import sys

MOD_LINES = """\
    from flwr_hetero.mod import hetero
    app = ClientApp(mods=[hetero])"""
"""The mod alone: times."""

STEP_LINES = {
    "transformers": """\
    # before trainer.train(), of a Trainer with num_train_epochs=1
    loader = hetero.batches(trainer.get_train_dataloader(), msg)
    trainer.get_train_dataloader = lambda: loader""",
    "lightning": """\
    loader = hetero.batches(loader, msg)  # takes the steps that the server asks for
    trainer.fit(model, loader)  # a Trainer with max_epochs=1""",
    "torch": """\
    loader = hetero.batches(loader, msg)  # takes the steps that the server asks for""",
    "sklearn": """\
    # before model.fit(X, y); or so many times model.partial_fit(X, y)
    model.max_iter = hetero.num_steps(msg, default=model.max_iter, batch_size=len(X))""",
    "numpy": """\
    # in place of the app's own number of steps, here 100 with batches of 32
    for _ in range(hetero.num_steps(msg, default=100, batch_size=32)):""",
}
"""How an app takes the steps that the server asks for, by framework."""

MODULES = {"pytorch_lightning": "lightning"}
"""Frameworks under another name."""


def framework() -> str:
    """Return the framework at hand: of what this process has loaded, what builds on most."""
    known = ("transformers", "lightning", "pytorch_lightning", "torch", "sklearn", "numpy")
    found = next(name for name in known if name == "numpy" or name in sys.modules)
    return MODULES.get(found, found)


def step_lines(*, has_mod: bool) -> str:
    """Return the lines for steps; without those for the mod if nodes have it."""
    lines = STEP_LINES[framework()]
    if has_mod:
        return f"    # mods=[hetero] is there, this is not\n{lines}"
    return f"{MOD_LINES}\n{lines}"
