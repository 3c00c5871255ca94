"""Small utilities that several packages of memlog use."""
