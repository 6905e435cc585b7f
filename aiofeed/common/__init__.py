"""What several add-ons use: bars, the cache folder, coroutines that run in constructors."""
