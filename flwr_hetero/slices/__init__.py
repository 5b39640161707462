r"""FedSlice: no rounds to wait for, a slice of steps for each node, and an average of models.

Server model w, average a, n nodes in flight, version t.

::

    1: node i takes tau_i steps from w_t, as many as fit a slice      strategy.Slices
    2: its update d_i waits in a buffer                               fedbuff.engine
    3: when max(2, n // 4) wait:                                      algorithm.buffer_size
    4:     w <- w + b sum_i (v_i / mean v) a(s_i) d_i / K             FedBuff, .largest_step
    5:     a <- a + p_t (w - a)                                       algorithm.new_part
    6: a round is over when the nodes trained as much as in FedAvg    strategy.SliceBuffer
"""
