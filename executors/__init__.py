"""The data plane: generations in flight, their outcomes, and the buffer to the trainer.

It starts and stops no engine.
"""
