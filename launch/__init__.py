"""Starting training jobs through NeMo-Run. Lives in an environment of its own (`make launch-env`)
and imports of the trainer only its configuration, `megatron_cgrpo.config`."""
