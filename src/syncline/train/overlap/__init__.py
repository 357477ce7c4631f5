"""Updates deferred to the next forward pass, parameter by parameter."""
