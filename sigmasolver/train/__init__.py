"""Training: what one batch costs (`objectives`)."""
