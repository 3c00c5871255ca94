"""Notice optimizer steps, and make a batch event of each."""
