"""Starting training jobs through NeMo-Run. Lives in an environment of its own (`make launch-env`)
and imports nothing of the trainer."""
