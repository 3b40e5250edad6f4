"""topk."""
