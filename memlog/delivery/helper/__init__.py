"""The helper process and its client in the trainer. The helper samples the process tree and uploads."""
