"""The stages: tokenize, train, evaluate and export."""
