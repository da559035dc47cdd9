"""The speed of steps on a GPU, and the measured figures that plans begin with."""
