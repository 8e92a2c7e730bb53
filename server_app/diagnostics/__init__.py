"""What local and global models say of the same images: similarity, collapse, drift."""
