"""Hot operations, each beside its plain-torch reference; `backend` chooses between them."""
