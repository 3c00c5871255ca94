"""Small tools without a concept of their own."""
