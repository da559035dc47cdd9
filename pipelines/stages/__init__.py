"""The four stages, one file each: tokenize, train, evaluate, export."""
