class ConfigError(ValueError):
    """A mistake in a configuration, told in one sentence: what, where, what to do."""
