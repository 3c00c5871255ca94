"""Scripts with and without a memory fault, and how well memlog tells them apart."""
