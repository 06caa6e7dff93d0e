"""The training loop and what surrounds it: metrics, logs, stopping, export."""
