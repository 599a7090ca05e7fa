"""bf16 on CPUs: some virtual machines announce instructions that kill the process that uses them."""
