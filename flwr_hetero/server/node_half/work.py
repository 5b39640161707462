"""A node's record of its work, among the metrics of its reply."""

from flwr.app import Message, MessageType

from flwr_hetero import keys
from flwr_hetero.records import read_number
from flwr_hetero.server.reply_checks import MAX_WEIGHT, drop_private_metrics


def settle_metrics(reply: Message) -> None:
    """Drop this package's private metrics, and add what a training reply's work record says."""
    drop_private_metrics(reply)
    if reply.metadata.message_type == MessageType.TRAIN:
        join_work(reply)


def join_work(reply: Message) -> None:
    """Copy steps and examples processed into the metrics, unless the app reports them itself."""
    work = reply.content.config_records.get(keys.WORK)
    if work is None:
        return
    for metrics in reply.content.metric_records.values():
        for key in (keys.NUM_STEPS, keys.EXAMPLES_PROCESSED):
            if key not in metrics and 0 <= read_number(work, key, -1.0) <= MAX_WEIGHT:
                metrics[key] = work[key]  # type: ignore[assignment]
