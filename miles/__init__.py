"""Miles: reinforcement learning for language models on a fleet of engines that may come and go."""
