"""Which measurement says something about which control, and what stands behind each control now."""
