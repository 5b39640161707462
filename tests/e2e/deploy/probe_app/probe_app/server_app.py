"""Ask a Grid the questions, and write down what it did."""

import json
import time
from pathlib import Path

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

EXPECTED = {
    "answer": ["content"],
    "no time-out": ["content", "content"],
    "ttl is over": ["error 3"],
    "second pull": ["error 3"],
    "unknown id": ["error 3"],
    "same message twice": ["content"],
    "same message again": "ValueError",
    "a reply as an instruction": "refused",
    "run is a copy": True,
    "unknown node": [],
    "app without a return": ["error 2"],
}
"""What a LocalGrid does."""
SUPERLINK = EXPECTED | {"unknown node": ["error 3"], "same message again": ["content"]}
SUPERLINK |= {"app without a return": []}
"""What a real SuperLink does: Flower's simulation is stricter, and so is a LocalGrid.

A SuperNode waits for the reply that its ClientApp did not give, and takes no message any more until
it is started again. So this is asked last.
"""
DEADLINE_S = 60.0
"""For a reply that has to come."""


def probe(grid) -> dict[str, object]:
    """Return what the grid does, by question."""
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    nodes = sorted(grid.get_node_ids())
    node = nodes[0]

    def message(does="answer", node_id=node, ttl=None):
        content = RecordDict({"config": ConfigRecord({"does": does})})
        return Message(content, node_id, "query", ttl=ttl)

    def ask(*messages, timeout=DEADLINE_S):
        return kinds(grid.send_and_receive(list(messages), timeout=timeout))

    def pull_twice():
        ids = list(grid.push_messages([message()]))
        start_s = time.monotonic()
        while not list(grid.pull_messages(ids)) and time.monotonic() < start_s + DEADLINE_S:
            time.sleep(0.1)
        return kinds(grid.pull_messages(ids))

    def reply_as_instruction():
        (reply,) = grid.send_and_receive([message()], timeout=DEADLINE_S)
        try:
            return "taken" if any(grid.push_messages([reply])) else "refused"
        except (ValueError, httpx.HTTPStatusError):
            return "refused"

    once = message()
    twice = message()
    questions = {
        "answer": lambda: ask(once),
        "no time-out": lambda: ask(message(), message(node_id=nodes[1]), timeout=None),
        "ttl is over": lambda: ask(message("work", ttl=1.0)),
        "second pull": pull_twice,
        "unknown id": lambda: kinds(grid.pull_messages(["0" * 64])),
        "same message twice": lambda: ask(twice, twice, timeout=10.0),
        "same message again": lambda: ask(once, timeout=10.0),
        "a reply as an instruction": reply_as_instruction,
        "run is a copy": lambda: grid.run is not grid.run,
        "unknown node": lambda: ask(message(node_id=12345), timeout=5.0),
        "app without a return": lambda: ask(message("nothing"), timeout=10.0),
    }
    return {name: attempt(question) for name, question in questions.items()}


def kinds(replies) -> list[str]:
    """Name what came: content, or an error's code."""
    return sorted("content" if r.has_content() else f"error {r.error.code}" for r in replies)


def attempt(call) -> object:
    """Return what a call returns, or the name of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


@app.main()
def main(grid, context):
    """Write the answers to ``output-dir``."""
    folder = Path(context.run_config["output-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.json").write_text(json.dumps(probe(grid)))
