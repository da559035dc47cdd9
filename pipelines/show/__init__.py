"""What is printed and drawn. Only verbs import it."""
