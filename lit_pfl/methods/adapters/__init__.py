"""Only adapters of a frozen network train, such as LoRA."""
