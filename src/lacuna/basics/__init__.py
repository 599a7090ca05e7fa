"""What every room may use: errors, storage, hashing, careful readers of foreign input, progress."""
