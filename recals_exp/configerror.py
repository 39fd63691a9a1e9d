"""The one kind of error that a user's configuration can cause."""


class ConfigError(ValueError):
    """A value of the configuration is not allowed; the message says what is."""
