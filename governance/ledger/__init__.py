"""The append-only Merkle log behind every figure: outbox, leaves, nodes, signed checkpoints."""
