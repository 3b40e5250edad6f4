"""vsa front end."""
