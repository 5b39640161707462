"""A Flower app with Hugging Face's Trainer: a tiny transformer."""
