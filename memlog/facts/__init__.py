"""Facts about a run, from its events: growth, peaks, steps, the verdict. Every report reads them."""
