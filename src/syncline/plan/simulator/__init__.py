"""The event simulator: from a profile, a network and a plan to a predicted timeline."""
