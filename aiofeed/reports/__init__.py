"""Views of a run: timelines. They know statistics only, not the engine."""
