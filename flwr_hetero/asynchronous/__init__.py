r"""FedBuff: buffered asynchronous aggregation.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022,
Algorithm 1. Server model w, version t; ``concurrency`` nodes are at work.

::

    1: start nodes, drawn uniformly from the idle ones      strategy.FedBuff.next_nodes
    2: on an update d_i of a node that started at t_i:
    3:     s <- t - t_i                                     strategy.FedBuff.merging
    4:     buffer <- buffer + a(s) d_i                      algorithm.staleness_weights
    5:     start another idle node                          engine.Work.collect
    6: when the buffer holds K updates:                     strategy.FedBuff.due
    7:     w <- w + eta_g sum(buffer) / K;  t <- t + 1      server.aggregate.with_update

What is ours: nodes that answer more often do not count more (algorithm.merge_weights).
"""
