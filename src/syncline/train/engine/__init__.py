"""What exchanges the messages of a plan that DDP's reducer cannot run by itself."""
