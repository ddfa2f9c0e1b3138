"""From text to batches: tokenizers, corpora on disk, and the order in which they are read."""
