"""The command line: one file per command; errors become exit codes in ``main`` alone."""
