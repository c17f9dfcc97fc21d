"""What a person sees of a run: live view, tables, pictures."""
