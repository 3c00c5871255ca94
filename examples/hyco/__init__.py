"""Experiments on simulated fluids, recorded by memlog.

One trains a network that continues simulations. The other recovers a simulation's start or a coefficient.
"""

import logging

logging.getLogger("Φ-ML").setLevel(logging.WARNING)  # it prints its choice of backend on stdout
