"""What runs inside a job: its price, its budget, its deadline, and the preemption notices of its machine."""
