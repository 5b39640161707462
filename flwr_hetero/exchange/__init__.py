"""Messages to nodes and their replies: one queue, what counts of replies, and who the nodes are."""
