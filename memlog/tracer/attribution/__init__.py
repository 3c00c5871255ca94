"""To which module, parameter, line or scope a tensor belongs."""
