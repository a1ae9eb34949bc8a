"""The model on one device of PyTorch's: weights and cache over its memory, the host's page-locked memory and the disk.

Everything here runs on `torch.device("cpu")` as it does on CUDA, but for streams and page-locking, which only the
latter has. The arithmetic between the products is `kernels.reference`'s.
"""
