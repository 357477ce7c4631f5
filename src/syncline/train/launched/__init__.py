"""What `syncline run` and `syncline advise` do in the processes of a script."""
