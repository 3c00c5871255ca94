"""The uploader: sends a journal to one tracker, in the helper process and in ``memlog sync``."""
