"""Programs to run and to read: each says in its first lines what it shows."""
