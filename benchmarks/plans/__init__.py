"""How close the plans of ``memlog advise RUN --fit`` are to the training that really makes their changes."""
