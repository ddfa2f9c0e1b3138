"""Measure what `plan` assumes: the links between ranks, the levels they form, and the device."""
