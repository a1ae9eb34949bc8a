"""What the hardware can do, what the work asks of it, and how near a run came to the limit."""
