"""The keys: one class a section, with type, bound, default and help of each key."""
