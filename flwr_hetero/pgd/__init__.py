r"""PGD, prioritised gradient descent.

Zhou and Gao, "Distributed Framework for Accelerating Training of Deep Learning Models through
Prioritization".

One iteration of a worker (Algorithm 1, with Algorithm 2 inside), and what each line is here:

        4: S <- the next r|D| data points, round-robin   algorithm.choose_batch
        8: g_i <- gradient(W, d_i)  for i in S           the training step's backward pass
        9: p_i <- gbar . g_i                             priorities.LayerPriorities, or
                                                         priorities.sample_priorities
       10: u_i <- learn(u_i, p_i, it)                    algorithm.learn (Alg. 2, l. 1-4)
       11: G <- G + g_i                                  the training step's backward pass
       13: p_i <- estimate(u_i, it)  for the others      algorithm.estimate (Alg. 2, l. 5-6)
       15: T <- the k|D| data points of highest p        algorithm.pick_top
    17-21: lines 8-11 for i in T                         as above: S and T are one batch
       22: gbar <- (1 - r - k) gbar + G                  priorities.AggregatedGradient.absorb

``sampler.PGDSampler(rule="topk")`` runs these lines, ``sampler.PriorityFeed`` in a training
loop. The default, ``rule="stochastic"``, is not the paper's: it draws by the same priorities
without bias (``algorithm.expected_counts``, ``algorithm.weighted_shuffle``).
"""
