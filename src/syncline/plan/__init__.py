"""Profiles, networks, plans and results: frozen, validated records with a versioned JSON form."""
