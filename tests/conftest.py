"""What holds for every test."""

import os

# Two threads of torch's that wait for each other on two busy cores were eight times slower than one. Set
# before torch is imported, so that the programs that tests start have it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
