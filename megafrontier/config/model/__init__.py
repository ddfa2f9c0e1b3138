"""The options of a model."""
