"""The fast path on a GPU: programs, kernels, captured steps. Knows nothing of ensembles."""
