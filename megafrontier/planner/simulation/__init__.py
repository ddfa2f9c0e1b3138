"""A step of the engine on a clock instead of a device."""
