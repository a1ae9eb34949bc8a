"""Benchmarks whose calls and result lines are fixed, so that outsiders can compare."""
