"""What lies between the matrix products: norms, rotation, attention over the paged cache, activations.

Two implementations of one interface (`base.Kernels`): `reference` in PyTorch, which runs everywhere, and `native`, C++
compiled on the spot where there is a compiler. Both pass the same numerical tests.
"""
