"""The engine host: what runs inside the worker process. Only `engines` touches torch, and only when it loads."""
