"""What keeps an accelerator busy: nothing here makes the host wait for its queue inside a step."""
