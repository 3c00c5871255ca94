"""What builds the documentation's site beyond mkdocs: hooks, the settings' table, the chart of costs."""
