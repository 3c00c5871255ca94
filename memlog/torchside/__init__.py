"""The only room that names private parts of torch."""
