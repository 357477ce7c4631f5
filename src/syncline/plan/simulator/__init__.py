"""The event simulator: profile, network and plan to a predicted timeline."""
