"""msa front end."""
