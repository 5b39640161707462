r"""System-aware biased local SGD.

Lim et al., "Biased Local SGD for Efficient Deep Learning on Heterogeneous Systems".

Algorithm 1, for N samples, P_F fast nodes that take tau_F steps a round, and P_S slow nodes::

     1: tau_S <- gamma tau_F                                algorithm.gamma_steps
     2: for each epoch
        N_F <- N tau_F P_F / (tau_F P_F + tau_S P_S)        algorithm.fast_share, epoch_sizes
     3:   choose the lambda N_F samples of highest loss     algorithm.fast_allocation
     4:   add (1 - lambda) N_F of the others at random      algorithm.fast_allocation
     5:   divide these N_F samples among the fast nodes     shared_data.SharedSamples
     6:   divide N - N_F random samples among the slow      algorithm.slow_allocation
     7:   until the epoch is over
     8:     slow nodes take tau_S steps                     strategy.LocalSteps
    11:     fast nodes take tau_F steps                     strategy.LocalSteps
    14:     record the loss of every processed sample       sampler.TopLossSampler.update
    15:     average the models by steps, Eq. (4)            strategy.BiasedLocalSGD.weights

gamma is measured unless it is given: algorithm.fast_class, of the step times in
strategy.NodeSpeeds. In the paper all nodes share one data set (shared_data.py); without
that each node runs lines 3 to 6 on its own samples (sampler.py), and nothing about a sample
leaves it.
"""
