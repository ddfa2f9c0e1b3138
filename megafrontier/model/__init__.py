"""GPT and its parts: knows shapes and tensors, nothing of ranks, levels or files of the run."""
