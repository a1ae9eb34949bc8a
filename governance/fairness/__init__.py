"""Are groups of requests served alike? Rates with intervals, ratios to the best-served group, verdicts with reasons."""
