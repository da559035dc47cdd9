"""The fused engine: a training step with its backward pass written out, over Triton, cuBLASLt and cuDNN."""
