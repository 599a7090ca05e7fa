"""What `lacuna.…` offers to other programs, one module per kind of thing; nothing in the product imports this room."""
