"""Hot operations, each beside its plain-torch reference; `dispatch` chooses between them."""
