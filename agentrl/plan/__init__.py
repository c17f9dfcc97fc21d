"""What a step of reinforcement learning costs before it is run: FLOPs, bytes, seconds, GPUs, sandboxes, dollars."""
