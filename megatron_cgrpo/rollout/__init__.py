"""vLLM servers, the client, weight transfer, and the pipeline generate → verify → critique →
refine → select."""
