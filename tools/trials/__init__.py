"""Many runs of the trainer as one piece of work (`lacuna tune`, `lacuna table`): jobs, the Ray crew that does them, and
the ledger of what is done."""
