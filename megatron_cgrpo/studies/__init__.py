"""Questions about the method that several runs answer, in the chain world."""
