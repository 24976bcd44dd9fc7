"""Part of the model is shared, the rest stays with its client."""
