"""Syncline's nouns: plain, frozen, validated data with a versioned JSON form."""
