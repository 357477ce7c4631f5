"""Updates that wait for the next forward pass, parameter by parameter."""
