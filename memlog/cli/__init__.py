"""Command line: one file per command. Only ``main`` converts errors to exit codes."""
