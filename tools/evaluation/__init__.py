"""What `lacuna eval` is made of: prediction files, the truth they are held against, the protocols, the report."""
