"""megafrontier: train GPT models with every state sharded to its own level of the machine."""

__version__ = "0.1.0"
