"""Command line: one file per command. Only ``main`` converts errors to exit codes."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of the group of all commands, and of each command.

click creates a command's help option only once, when the command is first used. If a program calls the
command without the group, click reads only the command's settings. So these settings must define ``-h``."""
