"""The library's surface: train any nn.Module with plain PyTorch's loop. See `shard`."""
