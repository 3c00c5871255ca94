"""From the journal to one tracker, in the helper process and in `memlog sync`."""
