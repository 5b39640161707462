"""A naive twin of FedBuff's Algorithm 1, on numbers instead of models."""

import math


def fedbuff(x, train, latency, starts, concurrency, buffer_size, merges):
    """Simulate an asynchronous run of nodes whose latencies are known.

    ``train(node, x)`` gives a node's model, ``starts`` the nodes in the order in which they are
    drawn. Return all server models, and who was merged with which staleness.
    """
    starts = iter(starts)
    now = 0.0
    version = 0
    at_work = []
    buffer = []
    found = [x]
    merged = []
    while version < merges:
        while len(at_work) < concurrency:
            node = next(starts)
            assert node not in [worker for _, worker, _, _ in at_work]
            at_work.append((now + latency[node], node, x, version))
        at_work.sort()
        now, node, began_with, began_at = at_work.pop(0)
        staleness = version - began_at
        update = (train(node, began_with) - began_with) / math.sqrt(1 + staleness)
        buffer.append((node, staleness, update))
        if len(buffer) == buffer_size:
            x = x + sum(update for _, _, update in buffer) / buffer_size
            version += 1
            found.append(x)
            merged.append([(node, staleness) for node, staleness, _ in buffer])
            buffer = []
    return found, merged
