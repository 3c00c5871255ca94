"""Learning of fluids from simulations, and of simulations' parameters from results, recorded by memlog."""

import logging

logging.getLogger("Φ-ML").setLevel(logging.WARNING)  # it prints its choice of backend on stdout
