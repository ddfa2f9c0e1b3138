"""Pipelines: the row of blocks cut into stages, and the tables that say who runs what when."""
