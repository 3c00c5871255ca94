"""Additions to mkdocs for the documentation's site: hooks, the table of settings, the chart of costs."""
