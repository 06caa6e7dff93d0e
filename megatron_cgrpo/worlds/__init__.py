"""Self-made problem worlds with exact step checkers, for the quickstart, tests and studies.

A problem's kind chooses its world, and with it the world's verifier and critic.
"""

from megatron_cgrpo.worlds.base import World
from megatron_cgrpo.worlds.chain import CHAIN

WORLDS: dict[str, World] = {"chain": CHAIN}
"""Problem kind → world."""
