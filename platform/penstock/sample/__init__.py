"""The sample: 64 product records of an invented shop, and the task that describes them. Data: CC0-1.0."""
