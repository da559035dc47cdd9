"""The formats of an export beside Hugging Face's."""
