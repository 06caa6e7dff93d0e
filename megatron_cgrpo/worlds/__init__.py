"""Self-made problem worlds with exact step checkers, for the quickstart, tests and studies."""
