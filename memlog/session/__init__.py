"""A session in the trainer's process: its arguments, its parts and how it ends."""
