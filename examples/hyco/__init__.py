"""Learns fluids from simulations, and parameters of simulations from their results; memlog watches both."""

import logging

logging.getLogger("Φ-ML").setLevel(logging.WARNING)  # it says on stdout which backend it takes
