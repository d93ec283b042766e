"""Implements samplers as pure functions on tensors: kernels, solvers, time grids, noise windows,
noise; ``samplers.tables`` names them. Needs torch only."""
