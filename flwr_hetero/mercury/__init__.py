r"""Mercury: importance sampling on the node, sized to the link's idle time.

Zeng, Yan, Zhang, Shu, Zhang: "Mercury: Efficient On-Device Distributed DNN Training via
Stochastic Importance Sampling", SenSys 2021.

::

    split the N local samples into D groups                      algorithm.make_groups
    for each round:
      4.3 M_i <- samples that fit into the link's idle time      algorithm.group_size, resize
      4.1 I_j <- importance of group i, round-robin              algorithm.advance, scoring
          I_j from the cross-entropy loss                        algorithm.error_probability
          for each mini-batch B:
            draw d groups, the latest ones preferred (Eq. 6)     algorithm.choose_groups
            draw samples of each by importance (Eq. 7)           algorithm.mixed_probs
            weigh gradients by p / q (Eq. 3)                     algorithm.inverse_probs
          (the default draws from all groups at once)            algorithm.draw_flat
      4.2 exchange important samples, group by group             resharding.offer, strategy.match
"""
