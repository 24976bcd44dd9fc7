"""A personalized model beside the shared one, or made from it."""
