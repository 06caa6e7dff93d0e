"""Problems, prompts and the order in which problems are visited."""
