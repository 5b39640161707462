r"""TiFL: A Tier-based Federated Learning System (Chai et al., HPDC 2020).

Nodes are timed and grouped into tiers of similar latency (section 4.2); one tier trains each
round, drawn from fixed probabilities (section 4.3), by Algorithm 2 (section 4.4, below), or, not
in the paper, by error and latency:

     1  NewProbs <- 1 / T; Credits_t                          algorithm.first_state
     2  for each round r                                      Flower's loop
     3    if r % I == 0 and r >= I and                        strategy.TiFL._is_due
     4       A^r_current <= A^(r-I)_current:                  algorithm.select, and so on to 16
     5         NewProbs <- ChangeProbs(A^r)                   algorithm.change_probs
     8    repeat
     9      currentTier <- one of T tiers with NewProbs
    10    until Credits_current > 0
    11    Credits_current <- Credits_current - 1
    15    C_r <- |C| random nodes of currentTier              algorithm.draw_nodes
    16    Credits_current <- Credits_current - 1              left out: it would be the second
    18    w_c <- TrainClient(c) for all c in C_r              the node's own training
    20    w <- sum_c w_c s_c / sum_c s_c                      the wrapped strategy
    22    A^r_t <- Eval(w, TestData_t) for each tier t        tiers.Tiers.accuracy

``tiers`` times the nodes and groups them; ``paper_estimate`` there is section 4.5.
"""
