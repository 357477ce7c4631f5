"""Selection of the largest elements, measured beside torch's."""
