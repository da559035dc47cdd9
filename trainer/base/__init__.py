"""What all rooms of the trainer stand on: records, the store, processes and ranks."""
