"""A personalized model next to the shared one, or made from it."""
