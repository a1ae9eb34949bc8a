"""Group-wise low-bit weights: packing, quantizing, and GGUF's blocks taken over as they are."""
