"""What a run looks like to its user: explanations and timelines, from its statistics."""
