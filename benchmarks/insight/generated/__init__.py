"""Generated training programs with a planted leak, each with a healthy twin, and memlog's score on them."""
