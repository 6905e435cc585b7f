"""Which sample comes when: order, shards, resume. No I/O."""
