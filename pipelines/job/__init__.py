"""What runs on a rented machine around a run: notices, budget, deadline and prices."""
