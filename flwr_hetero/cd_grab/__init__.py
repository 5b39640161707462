r"""CD-GraB: coordinated example orders, found by balancing gradients of all nodes together.

Cooper et al., "Coordinating Distributed Example Orders for Provably Accelerated Training",
NeurIPS 2023, https://arxiv.org/abs/2302.00845.

A node orders *units* (batches or examples), the server gives signs to *pairs* of units that the
node visits one after the other::

    Algorithm 1, Reorder                                  algorithm.reorder
    Algorithm 2, PairBalance, with greedy signs (B.2)     algorithm.pair_balance
    Algorithm 5, Balance by a random walk (Theorem 1)     algorithm.walk_balance

    Algorithm 3, worker i, epoch t                        sampler.OrderedSampler
       2: receive the order pi_i                          node_order.ServedOrder.follow
       3: for j = 1..n: visit unit pi_i(j)                node_order.NodeOrder.next_units
     4-5:   compute its gradient, send it                 gradients, node_order.ServedOrder.observe
     6-7:   receive the mean gradient, step               (Flower's aggregation)
       9: reorder the examples                            node_order.ServedOrder.start_pass

    Algorithm 4, order server, epoch t                    strategy.CDGraB
       3: r <- 0                                          strategy.OrderServer.receive
       5: collect g_{i,j} from all workers                wire.read_report
     6-7: average, broadcast                              (Flower's aggregation)
    8-13: for each pair of steps, for i = 1..m:           algorithm.balance_group
            signs of worker i's pair by PairBalance
      14: pi_i <- reorder(pi_i, s_i)                      strategy.NodeState.add
      15: send the orders                                 strategy.OrderServer.answer

    Eq. 8, parallel herding objective                     algorithm.herding_bound
"""
