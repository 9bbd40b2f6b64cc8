"""rljax: reinforcement learning from verifiable rewards for language models, in JAX.

Importing the package imports no JAX: reward workers load it in processes of their own.
"""

__version__ = "0.1.0"
