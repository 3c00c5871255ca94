"""The helper process, which samples the process tree and uploads, and its client in the trainer's process."""
